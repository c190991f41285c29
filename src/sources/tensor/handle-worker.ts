import { parentPort, workerData } from 'node:worker_threads'
import { native } from '../../native/load-addon.ts'
import { HandlePool } from './handle-pool.ts'
import type { HandleThreadData, ToHandleThread } from './handle-messages.ts'
import { packReply } from './handle-reply.ts'
import { VisibleGpus } from './visible-gpus.ts'
import { warmUp } from './warm-up.ts'

// The thread of the shares, for large bodies: one of 20,000 handles takes a long time to read, and as many files a long time to open,
// and neither may hold up the event loop. The files that it opens are closed when it ends, however it ends; of what else it holds the
// main thread takes care (HandleThread).

const port = parentPort!
const { visible } = workerData as HandleThreadData
const desk = new HandlePool(native(), visible === null ? null : new VisibleGpus(visible))

port.on('message', (message: ToHandleThread) => {
  if (message.type === 'end') {
    desk.close()
    return port.close()
  }
  const { packed, transfer } = packReply(desk.handle(message))
  port.postMessage(packed, transfer)
})

warmUp()
