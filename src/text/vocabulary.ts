/** The text of every token, as bytes. Survives a structured clone. */
export interface Vocabulary {
  /** All texts, one after another. */
  bytes: Uint8Array
  /** [ids + 1] where each token's text starts. The text of an unknown id is empty. */
  offsets: Uint32Array
  /** Ids of special tokens. */
  special: Int32Array
}

/** `bytesOf` returns the text of an id below `size`, null if it is unknown. */
export function makeVocabulary (
  size: number,
  bytesOf: (id: number) => Uint8Array | null,
  special: Iterable<number>
): Vocabulary {
  const texts = Array.from({ length: size }, (_, id) => bytesOf(id) ?? new Uint8Array())
  const offsets = new Uint32Array(size + 1)
  for (const [id, text] of texts.entries()) offsets[id + 1] = offsets[id]! + text.length
  const bytes = new Uint8Array(offsets[size]!)
  for (const [id, text] of texts.entries()) bytes.set(text, offsets[id])
  return { bytes, offsets, special: Int32Array.from(special) }
}
