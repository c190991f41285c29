import { parentPort } from 'node:worker_threads'
import { warmUp } from '../../src/sources/warm-up.ts'
import { readTensorBody } from '../../src/wire/torch-body.ts'
import { packTensorBody } from '../../src/wire/torch-packed.ts'

// The decoder in a thread as the server starts it: one message, one body, its milliseconds.

warmUp()
parentPort!.on('message', (entry: string) => {
  const start = performance.now()
  const packed = packTensorBody(readTensorBody({ entries: [entry], loadFormat: null, ranks: 1 }))
  parentPort!.postMessage({ ms: performance.now() - start, handles: packed.handles.length })
})
