import { readTensorBody } from '../../wire/torch/body.ts'
import { packTensorBody } from '../../wire/torch/packed.ts'

// A few tensors as torch 2.13 pickles them, in CPU memory and on a GPU (SGLang's form). They are only decoded, never
// opened.
const PAYLOAD =
  'gASV3AEAAAAAAABdlCiMDm1vZGVsLmEud2VpZ2h0lIwgdG9yY2gubXVsdGlwcm9jZXNzaW5nLnJlZHVjdGlvbnOUjA5yZWJ1aWxkX3RlbnNvcp' +
  'STlIwFdG9yY2iUjAZUZW5zb3KUk5RoAowVcmVidWlsZF90eXBlZF9zdG9yYWdllJOUaAKMGHJlYnVpbGRfc3RvcmFnZV9maWxlbmFtZZSTlCiM' +
  'DXRvcmNoLnN0b3JhZ2WUjA5VbnR5cGVkU3RvcmFnZZSTlEMmL3RtcC90b3JjaC1zaG0tZGlyLVNsanVCdy9tYW5hZ2VyLnNvY2uUQxkvdG9yY2' +
  'hfMTM2NzRfMTI1MDYwNzM4MF8wlEsMdJRSlIwFdG9yY2iUjAhiZmxvYXQxNpSTlIaUUpQoSwBoBYwEU2l6ZZSTlEsCSwOGlIWUUpRLA0sBhpSJ' +
  'dJSHlFKUhpSMDm1vZGVsLmIud2VpZ2h0lGgEaAdoCWgLKGgOQyYvdG1wL3RvcmNoLXNobS1kaXItU2xqdUJ3L21hbmFnZXIuc29ja5RDGS90b3' +
  'JjaF8xMzY3NF8xOTU2NTgyNTM1XzGUSxB0lFKUaBOMB2Zsb2F0MzKUk5SGlFKUKEsAaBlLBIWUhZRSlEsBhZSJdJSHlFKUhpRlLg=='
const GPU_PAYLOAD =
  'gASVTAMAAAAAAABdlCiMDm1vZGVsLmEud2VpZ2h0lIwcc2dsYW5nLnNydC51dGlscy5wYXRjaF90b3JjaJSMHV9yZWJ1aWxkX2N1ZGFfdGVuc2' +
  '9yX21vZGlmaWVklJOUKIwFdG9yY2iUjAZUZW5zb3KUk5RoBYwEU2l6ZZSTlEsESwiGlIWUUpRLCEsBhpRLAIwNdG9yY2guc3RvcmFnZZSMDFR5' +
  'cGVkU3RvcmFnZZSTlIwFdG9yY2iUjAhiZmxvYXQxNpSTlIwkM2YwY2UzYWItMTExMS0yMjIyLTMzMzMtMDEyMzQ1Njc4OWFilENCAmMACxYhLD' +
  'dCTVhjbnmEj5qlsLvG0dzn8v0IEx4pND9KVWBrdoGMl6KtuMPO2eTv+gUQGyYxPEdSXWhzfomUn6q1lEtATQACiUMQL3RvcmNoXzEyM180NTZf' +
  'MJRLAENAdH+KlaCrtsHM1+Lt+AMOGSQvOkVQW2ZxfIeSnaizvsnU3+r1AAsWISw3Qk1YY255hI+apbC7xtHc5/L9CBMeKZSIdJRSlIaUjA5tb2' +
  'RlbC5iLndlaWdodJRoBChoB2gJSyCFlIWUUpRLAYWUSwBoEGgTaBRDQgJjAAsWISw3Qk1YY255hI+apbC7xtHc5/L9CBMeKTQ/SlVga3aBjJei' +
  'rbjDztnk7/oFEBsmMTxHUl1oc36JlJ+qtZRLQE0AAolDEC90b3JjaF8xMjNfNDU2XzCUSwFDQJmkr7rF0Nvm8fwHEh0oMz5JVF9qdYCLlqGst8' +
  'LN2OPu+QQPGiUwO0ZRXGdyfYiTnqm0v8rV4Ov2AQwXIi04Q06UiHSUUpSGlIwObW9kZWwuYy53ZWlnaHSUaAQoaAdoCUsESwiGlIWUUpRLCEsB' +
  'hpRLAGgQaBGMB2Zsb2F0MzKUk5RoFENCAmMACxYhLDdCTVhjbnmEj5qlsLvG0dzn8v0IEx4pND9KVWBrdoGMl6KtuMPO2eTv+gUQGyYxPEdSXW' +
  'hzfomUn6q1lE0ABE0AAolDEC90b3JjaF8xMjNfNDU2XzCUSwJDQL7J1N/q9QALFiEsN0JNWGNueYSPmqWwu8bR3Ofy/QgTHik0P0pVYGt2gYyX' +
  'oq24w87Z5O/6BRAbJjE8R1JdaHOUiHSUUpSGlGUu'
const ROUNDS = 300
/**
 * PROTO, FRAME with its length, EMPTY_LIST, MEMOIZE and MARK precede the items of a list; APPENDS and STOP follow them.
 */
const HEAD = 2 + 9 + 3
const TAIL = 2
const COPIES = 1500

/**
 * Runs the decoder until it is compiled. Otherwise the first large body in a fresh thread takes several times as long.
 */
export function warmUp (): void {
  for (let i = 0; i < ROUNDS; i++) for (const entry of [PAYLOAD, GPU_PAYLOAD]) decode(entry)
  // Large bodies compile the loops for many iterations, and grow the heap.
  for (let i = 0; i < 3; i++) for (const entry of [PAYLOAD, GPU_PAYLOAD]) decode(repeated(entry))
}

function decode (entry: string | Uint8Array): void {
  packTensorBody(readTensorBody({ entries: [entry], loadFormat: null, ranks: 1 }))
}

/** The list with its items repeated. The repeated items set the same memo entries to the same values. */
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
