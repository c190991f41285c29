import { parentPort, workerData } from 'node:worker_threads'
import { native } from '../../native/load-addon.ts'
import { HandlePool } from './handle-pool.ts'
import type { HandleThreadData, ToHandleThread } from './handle-messages.ts'
import { packReply } from './handle-reply.ts'
import { VisibleGpus } from './visible-gpus.ts'
import { warmUp } from './warm-up.ts'

// The handle thread, for large bodies. Reading 20,000 handles and opening as many files takes long and must not block
// the event loop. The files that the thread opens are closed when it ends for any reason. The main thread
// (HandleThread) releases the rest.

const WARM_UP_AFTER_MS = 5000

const port = parentPort!
const { visible, warmUp: isWarmed } = workerData as HandleThreadData
const pool = new HandlePool(native(), visible === null ? null : new VisibleGpus(visible))

port.on('message', (message: ToHandleThread) => {
  if (message.type === 'end') {
    pool.close()
    return port.close()
  }
  const { packed, transfer } = packReply(pool.handle(message))
  port.postMessage(packed, transfer)
})

// After the start of a server, which has better uses for the CPU. A body that comes sooner takes a little longer.
if (isWarmed) setTimeout(warmUp, WARM_UP_AFTER_MS).unref()
