import { parentPort } from 'node:worker_threads'
import { native } from '../../src/native/load-addon.ts'
import { warmUp } from '../../src/sources/tensor/warm-up.ts'
import { readTensorBody } from '../../src/wire/torch/body.ts'
import { readHandleLists } from '../../src/wire/torch/handle-lists.ts'
import { packTensorBody } from '../../src/wire/torch/packed.ts'
import { decodePayload } from '../../src/wire/torch/payload.ts'

// The decoders in a thread as the server starts it: one message, one body, its milliseconds. `lists`: by the addon's
// reader for lists of handles; else by the reader for every payload.

warmUp()
parentPort!.on('message', ({ entry, lists }: { entry: string, lists: boolean }) => {
  const start = performance.now()
  const found = lists
    ? readHandleLists(native(), [decodePayload(entry)])!.segments.length
    : packTensorBody(readTensorBody({ entries: [entry], loadFormat: null, ranks: 1 })).handles.length
  parentPort!.postMessage({ ms: performance.now() - start, segments: found })
})
