import type { Vocabulary } from '../text/vocabulary.ts'

/**
 * The texts of all tokens as a tree of bytes, flat and in depth-first order: a walk is a loop over arrays. Tokens
 * without text are left out.
 */
export class TokenTrie {
  readonly vocabSize: number
  readonly vocabulary: Vocabulary
  /** Per node: its byte, its depth (1 for the first byte), and the index of the first node that is not below it. */
  readonly byte: Uint8Array
  readonly depth: Uint16Array
  readonly skip: Uint32Array
  /** [nodes + 1] where the ids of the tokens that end at each node start in `ids`. */
  readonly idOffsets: Uint32Array
  readonly ids: Int32Array
  readonly maxDepth: number

  /** `vocabSize`: of the model. Ids of the tokenizer from there on are left out. */
  constructor (vocabulary: Vocabulary, vocabSize: number) {
    this.vocabulary = vocabulary
    this.vocabSize = vocabSize
    const { bytes, offsets } = vocabulary
    const size = Math.min(offsets.length - 1, vocabSize)
    const sorted = sortedIds(vocabulary, size)
    const byte: number[] = []
    const depth: number[] = []
    const idOffsets: number[] = []
    let before = -1
    for (const [at, id] of sorted.entries()) {
      const start = offsets[id]!
      const length = offsets[id + 1]! - start
      const shared = before < 0 ? 0 : commonPrefix(vocabulary, before, id)
      for (let i = shared; i < length; i++) {
        byte.push(bytes[start + i]!)
        depth.push(i + 1)
        idOffsets.push(at)
      }
      before = id
    }
    this.ids = Int32Array.from(sorted)
    this.byte = Uint8Array.from(byte)
    this.depth = Uint16Array.from(depth)
    this.idOffsets = idOffsetsOf(idOffsets, this.depth, sorted, vocabulary)
    this.skip = skips(this.depth)
    this.maxDepth = depth.reduce((most, one) => Math.max(most, one), 0)
  }

  /** The tokens with a text. */
  idsOf (text: string): number[] {
    const bytes = Buffer.from(text)
    return [...this.ids].filter(id => bytes.equals(this.textOf(id)))
  }

  /** The text of a token; empty for an id that the tokenizer does not know. */
  textOf (id: number): Uint8Array {
    const { bytes, offsets } = this.vocabulary
    return id + 1 < offsets.length ? bytes.subarray(offsets[id], offsets[id + 1]) : bytes.subarray(0, 0)
  }
}

/** Ids of tokens with a text, in the order of their texts. */
function sortedIds ({ bytes, offsets }: Vocabulary, size: number): number[] {
  const view = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length)
  const texts = Array.from(
    { length: size },
    (_, id) => ({ id, text: view.toString('latin1', offsets[id], offsets[id + 1]) })
  )
  return texts
    .filter(({ text }) => text !== '' && text.length < 1 << 16)
    .sort((a, b) => a.text < b.text ? -1 : a.text > b.text ? 1 : a.id - b.id)
    .map(({ id }) => id)
}

function commonPrefix ({ bytes, offsets }: Vocabulary, a: number, b: number): number {
  const most = Math.min(offsets[a + 1]! - offsets[a]!, offsets[b + 1]! - offsets[b]!)
  let length = 0
  while (length < most && bytes[offsets[a]! + length] === bytes[offsets[b]! + length]) length++
  return length
}

/**
 * `firsts`: for each node the index of the first token at or below it. Tokens that end at the node come first, and the
 * tokens of its first child follow.
 */
function idOffsetsOf (
  firsts: readonly number[],
  depth: Uint16Array,
  sorted: readonly number[],
  { offsets }: Vocabulary
): Uint32Array {
  // The tokens of a node lie between its own first and the first of the next node in the order.
  const out = new Uint32Array(firsts.length + 1)
  for (let node = 0; node < firsts.length; node++) {
    const id = sorted[firsts[node]!]
    const ends = id !== undefined && offsets[id + 1]! - offsets[id]! === depth[node]
    out[node] = ends ? firsts[node]! : -1 >>> 0
  }
  out[firsts.length] = sorted.length
  // A node without a token of its own has an empty list, which starts where the next one does.
  for (let node = firsts.length - 1; node >= 0; node--) if (out[node] === -1 >>> 0) out[node] = out[node + 1]!
  return out
}

function skips (depth: Uint16Array): Uint32Array {
  const skip = new Uint32Array(depth.length)
  /** The node and those above it, whose end is not known yet. */
  const open: number[] = []
  for (const [node, level] of depth.entries()) {
    for (const above of open.splice(level - 1)) skip[above] = node
    open.push(node)
  }
  for (const node of open) skip[node] = depth.length
  return skip
}
