import { parentPort, workerData } from 'node:worker_threads'
import { Heartbeat } from '../../../src/engine/heartbeat.ts'
import type { FromWorker, WorkerData } from '../../../src/engine/messages.ts'
import { WorkerLoop } from '../../../src/engine/worker-loop.ts'
import { FakeDevice } from '../fake-device.ts'

// The scheduler's worker with the fake device instead of a native core. A request with a magic seed crashes the thread.

/** The owner of the worker can hold it in a step: [steps that it may begin; -1: any number]. */
export interface Held {
  mayBegin: Int32Array
}

export const EXIT_SEED = 0xdead_0001n
export const THROW_SEED = 0xdead_0002n
export const LOST_SEED = 0xdead_0003n
export const STUCK_SEED = 0xdead_0004n

if (parentPort !== null) {
  const port = parentPort
  const { core, scheduler, heartbeat, mayBegin } = workerData as WorkerData & Held
  const device = new FakeDevice(core.pages, core.pageSize, scheduler.vocabSize)
  /** The seeds of the steps under way. */
  const seeds: bigint[][] = []
  const loop = new WorkerLoop(port, {
    ...scheduler,
    pages: core.pages,
    pageSize: core.pageSize,
    heartbeat: new Heartbeat(heartbeat),
    device: {
      begin: batch => {
        seeds.push([...batch.rowSeeds])
        device.begin(batch)
      },
      collect: () => {
        const rowSeeds = seeds.shift()!
        Atomics.wait(mayBegin, 0, 0)
        if (Atomics.load(mayBegin, 0) > 0) Atomics.sub(mayBegin, 0, 1)
        if (rowSeeds.includes(EXIT_SEED)) process.exit(7)
        if (rowSeeds.includes(THROW_SEED)) {
          process.nextTick(() => {
            throw new Error('the scheduler has a defect')
          })
        }
        if (rowSeeds.includes(LOST_SEED)) {
          throw Object.assign(new Error('rank 1, GPU 3 (H100): the kernel "attention" failed'), {
            code: 'DEVICE_LOST'
          })
        }
        if (rowSeeds.includes(STUCK_SEED)) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)
        // A slow step, so the other thread can act in the middle of a request.
        Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1)
        return device.collect()
      }
    },
    now: () => performance.now(),
    drawSeed: () => 99n
  }, () => {
    port.postMessage({ type: 'closed' } satisfies FromWorker)
    port.close()
  })
  void loop
  port.postMessage({ type: 'ready', core: 41 } satisfies FromWorker)
}
