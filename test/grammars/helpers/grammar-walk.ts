import { Automaton } from '../../../src/grammars/automaton.ts'
import { compile } from '../../../src/grammars/compile.ts'
import { Grammars } from '../../../src/grammars/grammars.ts'
import type { GrammarMatcher } from '../../../src/grammars/grammar-matcher.ts'
import type { Grammar, Language } from '../../../src/contract/grammar.ts'
import { makeVocabulary } from '../../../src/text/vocabulary.ts'
import type { Vocabulary } from '../../../src/text/vocabulary.ts'

/** Whether a grammar accepts texts, byte by byte: 'whole', 'begun' (more must follow) or 'no'. */
export function reader (language: Language): (text: string | Buffer) => 'whole' | 'begun' | 'no' {
  const automaton = new Automaton(compile(language))
  return text => {
    const at = automaton.read(Buffer.from(text), automaton.start)
    return at === null ? 'no' : at.canEnd ? 'whole' : 'begun'
  }
}

export const EOS = 0
export const SPECIAL = 1

/** Ids: 0 eos, 1 another special token, all bytes from 2, then these texts. */
export function vocabularyOf (texts: readonly string[]): Vocabulary & { size: number } {
  const size = 258 + texts.length
  const bytesOf = (id: number): Buffer =>
    id === EOS
      ? Buffer.from('<eos>')
      : id === SPECIAL
      ? Buffer.from('<call>')
      : id < 258
      ? Buffer.of(id - 2)
      : Buffer.from(texts[id - 258]!)
  return { ...makeVocabulary(size, bytesOf, [EOS, SPECIAL]), size }
}

export const PIECES = [
  '"',
  '{"',
  '":',
  '": ',
  '", "',
  '"}',
  '}',
  ' ',
  '  ',
  '\n  ',
  'true',
  'fal',
  'null',
  'é',
  '中文',
  '😀',
  'abc',
  'ab',
  'cd',
  '12',
  '0.',
  '-',
  '-1',
  ', ',
  '],',
  '\\"',
  '\\u',
  '<think>',
  '</think>',
  'foo'
]

export function grammarsOf (vocabulary: Vocabulary & { size: number }, eosTokenIds: number[] = [EOS]): Grammars {
  return new Grammars({ vocabulary, vocabSize: vocabulary.size, eosTokenIds })
}

export function allowed (matcher: GrammarMatcher, size: number): number[] {
  const mask = matcher.mask()
  return Array.from({ length: size }, (_, id) => id).filter(id =>
    mask === null || (mask[id >>> 5]! >>> (id & 31) & 1) === 1
  )
}

/** A number from 0 to below 1, reproducible. */
export function random (seed: number): () => number {
  let state = seed >>> 0
  return () => {
    state = Math.imul(state ^ (state >>> 15), 0x2c1b3c6d) + 0x9e3779b9 >>> 0
    return (state ^ (state >>> 13)) / 2 ** 32 >= 1 ? 0 : ((state ^ (state >>> 13)) >>> 0) / 2 ** 32
  }
}

/** Texts that follow a grammar, by random tokens. Prefers tokens that close something. Null: none ended in time. */
export function walk (
  grammars: Grammars,
  vocabulary: Vocabulary & { size: number },
  grammar: Grammar,
  seed: number,
  onStep: (matcher: GrammarMatcher, text: Buffer, ids: number[]) => void = () => {}
): string | null {
  const next = random(seed)
  const matcher = grammars.matcher(grammar)
  const texts = (id: number): Buffer =>
    Buffer.from(vocabulary.bytes.subarray(vocabulary.offsets[id], vocabulary.offsets[id + 1]))
  let text = Buffer.alloc(0)
  for (let step = 0; step < 600; step++) {
    const ids = allowed(matcher, vocabulary.size)
    onStep(matcher, text, ids)
    if (ids.length === 0) throw new Error(`stuck after ${text.toString()}`)
    const closing = ids.filter(id => id === EOS || /^["\]},]/.test(texts(id).toString()))
    const from = closing.length > 0 && next() < 0.4 ? closing : ids
    const id = from[Math.floor(next() * from.length)]!
    if (!matcher.accept(id)) throw new Error(`allowed, but not accepted: ${id} after ${text.toString()}`)
    if (matcher.ended) return text.toString()
    text = Buffer.concat([text, texts(id)])
  }
  return null
}
