import { readTensorBody } from '../../wire/torch/body.ts'
import { packTensorBody } from '../../wire/torch/packed.ts'

// A few tensors as torch 2.13 shares them, of CPU memory and of a GPU (SGLang's form). Only decoded, never opened.
const PAYLOAD =
  'gASV3AEAAAAAAABdlCiMDm1vZGVsLmEud2VpZ2h0lIwgdG9yY2gubXVsdGlwcm9jZXNzaW5nLnJlZHVjdGlvbnOUjA5yZWJ1aWxkX3RlbnNvcpSTlIwFdG9yY2iUjAZUZW' +
  '5zb3KUk5RoAowVcmVidWlsZF90eXBlZF9zdG9yYWdllJOUaAKMGHJlYnVpbGRfc3RvcmFnZV9maWxlbmFtZZSTlCiMDXRvcmNoLnN0b3JhZ2WUjA5VbnR5cGVkU3RvcmFn' +
  'ZZSTlEMmL3RtcC90b3JjaC1zaG0tZGlyLVNsanVCdy9tYW5hZ2VyLnNvY2uUQxkvdG9yY2hfMTM2NzRfMTI1MDYwNzM4MF8wlEsMdJRSlIwFdG9yY2iUjAhiZmxvYXQxNp' +
  'STlIaUUpQoSwBoBYwEU2l6ZZSTlEsCSwOGlIWUUpRLA0sBhpSJdJSHlFKUhpSMDm1vZGVsLmIud2VpZ2h0lGgEaAdoCWgLKGgOQyYvdG1wL3RvcmNoLXNobS1kaXItU2xq' +
  'dUJ3L21hbmFnZXIuc29ja5RDGS90b3JjaF8xMzY3NF8xOTU2NTgyNTM1XzGUSxB0lFKUaBOMB2Zsb2F0MzKUk5SGlFKUKEsAaBlLBIWUhZRSlEsBhZSJdJSHlFKUhpRlLg' +
  '=='
const GPU_PAYLOAD =
  'gASVTAMAAAAAAABdlCiMDm1vZGVsLmEud2VpZ2h0lIwcc2dsYW5nLnNydC51dGlscy5wYXRjaF90b3JjaJSMHV9yZWJ1aWxkX2N1ZGFfdGVuc29yX21vZGlmaWVklJOUKIwF' +
  'dG9yY2iUjAZUZW5zb3KUk5RoBYwEU2l6ZZSTlEsESwiGlIWUUpRLCEsBhpRLAIwNdG9yY2guc3RvcmFnZZSMDFR5cGVkU3RvcmFnZZSTlIwFdG9yY2iUjAhiZmxvYXQxNpST' +
  'lIwkM2YwY2UzYWItMTExMS0yMjIyLTMzMzMtMDEyMzQ1Njc4OWFilENCAmMACxYhLDdCTVhjbnmEj5qlsLvG0dzn8v0IEx4pND9KVWBrdoGMl6KtuMPO2eTv+gUQGyYxPEdS' +
  'XWhzfomUn6q1lEtATQACiUMQL3RvcmNoXzEyM180NTZfMJRLAENAdH+KlaCrtsHM1+Lt+AMOGSQvOkVQW2ZxfIeSnaizvsnU3+r1AAsWISw3Qk1YY255hI+apbC7xtHc5/L9' +
  'CBMeKZSIdJRSlIaUjA5tb2RlbC5iLndlaWdodJRoBChoB2gJSyCFlIWUUpRLAYWUSwBoEGgTaBRDQgJjAAsWISw3Qk1YY255hI+apbC7xtHc5/L9CBMeKTQ/SlVga3aBjJei' +
  'rbjDztnk7/oFEBsmMTxHUl1oc36JlJ+qtZRLQE0AAolDEC90b3JjaF8xMjNfNDU2XzCUSwFDQJmkr7rF0Nvm8fwHEh0oMz5JVF9qdYCLlqGst8LN2OPu+QQPGiUwO0ZRXGdy' +
  'fYiTnqm0v8rV4Ov2AQwXIi04Q06UiHSUUpSGlIwObW9kZWwuYy53ZWlnaHSUaAQoaAdoCUsESwiGlIWUUpRLCEsBhpRLAGgQaBGMB2Zsb2F0MzKUk5RoFENCAmMACxYhLDdC' +
  'TVhjbnmEj5qlsLvG0dzn8v0IEx4pND9KVWBrdoGMl6KtuMPO2eTv+gUQGyYxPEdSXWhzfomUn6q1lE0ABE0AAolDEC90b3JjaF8xMjNfNDU2XzCUSwJDQL7J1N/q9QALFiEs' +
  'N0JNWGNueYSPmqWwu8bR3Ofy/QgTHik0P0pVYGt2gYyXoq24w87Z5O/6BRAbJjE8R1JdaHOUiHSUUpSGlGUu'
const ROUNDS = 300
/** PROTO, FRAME with its length, EMPTY_LIST, MEMOIZE and MARK stand before the items of a list; APPENDS and STOP after them. */
const HEAD = 2 + 9 + 3
const TAIL = 2
const COPIES = 1500

/** Runs the decoder until it is compiled: the first large body in a fresh thread otherwise takes several times as long. */
export function warmUp (): void {
  for (let i = 0; i < ROUNDS; i++) for (const entry of [PAYLOAD, GPU_PAYLOAD]) decode(entry)
  // Loops are compiled for the many turns that they take in a large body, and the heap grows to what it needs.
  for (let i = 0; i < 3; i++) for (const entry of [PAYLOAD, GPU_PAYLOAD]) decode(repeated(entry))
}

function decode (entry: string | Uint8Array): void {
  packTensorBody(readTensorBody({ entries: [entry], loadFormat: null, ranks: 1 }))
}

/** The items again and again: their places in the memo are those of the first time, which hold the same. */
function repeated (entry: string): Uint8Array {
  const bytes = Buffer.from(entry, 'base64')
  const items = bytes.subarray(HEAD, -TAIL)
  return Buffer.concat([
    bytes.subarray(0, 2),
    Buffer.from(']\x94(', 'latin1'),
    ...new Array<Buffer>(COPIES).fill(items),
    bytes.subarray(-TAIL)
  ])
}
