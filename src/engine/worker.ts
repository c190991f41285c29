import { parentPort, workerData } from 'node:worker_threads'
import { errorMessage, RefitError } from '../errors.ts'
import { native } from '../native/load-addon.ts'
import { Grammars } from '../grammars/grammars.ts'
import { Heartbeat } from './heartbeat.ts'
import type { FromWorker, WorkerData } from './messages.ts'
import { seedSource } from './seed-source.ts'
import { WorkerLoop } from './worker-loop.ts'
import { collectYoungGarbage } from './young-garbage.ts'

// The scheduler's thread. It makes the core, steps it and frees it on request. The main thread attaches to it by its
// handle.

const port = parentPort!
const { core: config, scheduler, heartbeat, randomSeed, vocabulary } = workerData as WorkerData

function post (message: FromWorker): void {
  port.postMessage(message)
}

function start (): void {
  const addon = native()
  const core = addon.createCore(config)
  const loop = new WorkerLoop(port, {
    ...scheduler,
    ...vocabulary === null ? {} : { grammars: new Grammars({ ...scheduler, vocabulary }) },
    pages: config.pages,
    pageSize: config.pageSize,
    heartbeat: new Heartbeat(heartbeat),
    device: {
      begin: batch => {
        addon.beginStep(core, batch)
      },
      collect: () => {
        // While the device computes.
        collectYoungGarbage()
        return addon.collectStep(core)
      }
    },
    now: () => performance.now(),
    drawSeed: seedSource(randomSeed)
  }, () => {
    addon.closeCore(core)
    post({ type: 'closed' })
    // Without a listener the thread has nothing to wait for and ends.
    port.close()
  })
  void loop
  post({ type: 'ready', core })
}

try {
  start()
} catch (error) {
  const native = (error as { code?: unknown }).code
  const code = error instanceof RefitError
    ? error.code
    : native === 'NO_MEMORY' || native === 'DEVICE_LOST'
    ? native
    : 'CONFIG'
  const advice = native === 'NO_MEMORY'
    ? '; lower --mem-fraction or --max-total-tokens, use more GPUs (--tp), or end other programs that use the memory'
    : ''
  post({
    type: 'failed',
    code,
    message: `the engine could not be started: ${errorMessage(error)}${advice}`
  })
  port.close()
}
