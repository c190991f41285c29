// Most decoders of tokenizer.json map each token to bytes, join all bytes and read them as UTF-8. For these the text of
// a growing sequence costs one look-up per token, and no token is decoded twice.

export interface ByteForm {
  /** Bytes of a token. `added`: it is in added_tokens, spelt out. */
  bytesOf: (token: string, added: boolean) => Buffer
  /**
   * Removed from the start of a whole text: at most `count` times `content` (the space that SentencePiece puts before
   * the first word).
   */
  strip: { content: string, count: number } | null
}

type Step = Record<string, unknown>

/**
 * Null unless the decoder has one of the known shapes: ByteLevel; Metaspace; or Replace, ByteFallback, Fuse, Strip at
 * the start, in this order.
 */
export function byteForm (decoder: unknown): ByteForm | null {
  const steps = flatten(decoder)
  if (steps === null) return null
  if (steps.length === 1 && steps[0]!['type'] === 'ByteLevel') return { bytesOf: byteLevelBytes, strip: null }
  if (steps.length === 1 && steps[0]!['type'] === 'Metaspace') return metaspaceForm(steps[0]!)
  return sentencePieceForm(steps)
}

function metaspaceForm (step: Step): ByteForm {
  const mark = typeof step['replacement'] === 'string' ? step['replacement'] : '\u2581'
  const prefixed = step['prepend_scheme'] !== 'never' && step['add_prefix_space'] !== false
  return {
    bytesOf: token => Buffer.from(token.replaceAll(mark, ' '), 'utf8'),
    strip: prefixed ? { content: ' ', count: 1 } : null
  }
}

function sentencePieceForm (steps: Step[]): ByteForm | null {
  const replacements: [from: string, to: string][] = []
  let at = 0
  for (; steps[at]?.['type'] === 'Replace'; at++) {
    const from = (steps[at]!['pattern'] as Step | undefined)?.['String']
    const to = steps[at]!['content']
    if (typeof from !== 'string' || from === '' || typeof to !== 'string') return null
    replacements.push([from, to])
  }
  const fallback = steps[at]?.['type'] === 'ByteFallback'
  if (fallback) at++
  if (replacements.length === 0 && !fallback) return null
  const fused = steps[at]?.['type'] === 'Fuse'
  if (fused) at++
  let strip: ByteForm['strip'] = null
  const last = steps[at]
  if (fused && last?.['type'] === 'Strip' && typeof last['content'] === 'string' && last['stop'] === 0) {
    if (Number(last['start']) > 0) strip = { content: last['content'], count: Number(last['start']) }
    at++
  }
  if (at !== steps.length) return null
  return {
    strip,
    bytesOf (token) {
      for (const [from, to] of replacements) token = token.replaceAll(from, () => to)
      const byte = fallback ? /^<0x([0-9A-Fa-f]{2})>$/.exec(token)?.[1] : undefined
      return byte === undefined ? Buffer.from(token, 'utf8') : Buffer.from(byte, 'hex')
    }
  }
}

function flatten (decoder: unknown): Step[] | null {
  if (typeof decoder !== 'object' || decoder === null) return null
  const step = decoder as Step
  if (step['type'] !== 'Sequence') return [step]
  if (!Array.isArray(step['decoders'])) return null
  const all: Step[] = []
  for (const inner of step['decoders']) {
    const steps = flatten(inner)
    if (steps === null) return null
    all.push(...steps)
  }
  return all
}

// GPT-2's alphabet: a printable byte is its own character, the others are U+0100 and up, in order.
const BYTE_OF_CHAR = new Map<string, number>()
for (let byte = 0, other = 0x100; byte < 256; byte++) {
  const printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte !== 0xad)
  BYTE_OF_CHAR.set(String.fromCharCode(printable ? byte : other++), byte)
}

function byteLevelBytes (token: string, added: boolean): Buffer {
  if (added) return Buffer.from(token, 'utf8')
  const bytes: number[] = []
  for (const char of token) {
    const byte = BYTE_OF_CHAR.get(char)
    if (byte === undefined) return Buffer.from(token, 'utf8')
    bytes.push(byte)
  }
  return Buffer.from(bytes)
}
