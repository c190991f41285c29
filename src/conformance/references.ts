import type { Answer, Server } from './servers/server.ts'
import type { VariantName } from './variants.ts'

/** The answers of a server with some weights. */
export interface Fingerprint {
  /** Logprobs of the fixed prompts. */
  scores: number[]
  /** The digest of all weights; null if the server has no checksums. */
  digest: string | null
}

export interface Reference extends Fingerprint {
  /** Greedy answers to the fixed prompts. */
  answers: Answer[]
}

export const PROMPTS = 4
const PROMPT_TOKENS = 24
export const ANSWER_TOKENS = 24
/** Differences of logprobs that count as none, on the most exact server. */
const LEAST_TOLERANCE = 1e-3
/** Noise is measured a few times only, so its bound is a multiple of the largest. */
const MARGIN = 5

/** The answers of the server with each variant, after clean whole updates. */
export class References {
  readonly prompts: readonly number[][]
  readonly #known = new Map<VariantName, Reference>()
  /** The largest difference between logprobs of the same weights: of prompts, and between prompt and output. */
  #noise = { score: 0, output: 0 }

  constructor (vocabulary: number) {
    this.prompts = Array.from({ length: PROMPTS }, (_, i) => makePrompt(i, PROMPT_TOKENS, vocabulary))
  }

  get tolerance (): { score: number, output: number } {
    const bound = (noise: number): number => Math.max(LEAST_TOLERANCE, MARGIN * noise)
    return { score: bound(this.#noise.score), output: bound(this.#noise.output) }
  }

  async fingerprint (server: Server): Promise<Fingerprint> {
    const scores = await Promise.all(this.prompts.map(async prompt => await server.score(prompt)))
    return { scores: scores.flat(), digest: await server.digest() }
  }

  async learn (name: VariantName, server: Server): Promise<void> {
    const first = await this.fingerprint(server)
    const answers: Answer[] = []
    for (const prompt of this.prompts) answers.push(await server.generate(prompt, { tokens: ANSWER_TOKENS }))
    this.#known.set(name, { ...first, answers })
    await this.#measureNoise(server, first, answers)
  }

  get (name: VariantName): Reference {
    const reference = this.#known.get(name)
    if (reference === undefined) throw new Error(`variant ${name} has not been learned`)
    return reference
  }

  /** The variant with these answers and checksums; null if there is none. */
  identify ({ scores, digest }: Fingerprint): VariantName | null {
    for (const [name, known] of this.#known) {
      const isSame = digest === null || known.digest === null || digest === known.digest
      if (isSame && difference(scores, known.scores) <= this.tolerance.score) return name
    }
    return null
  }

  /** Differences from each variant, for details. */
  describe ({ scores, digest }: Fingerprint): string {
    return [...this.#known]
      .map(([name, known]) => {
        const same = digest !== null && digest === known.digest ? ', the checksums of it' : ''
        return `${difference(scores, known.scores).toFixed(3)} from ${name}${same}`
      })
      .join(', ')
  }

  /** The smallest difference between two variants. */
  get distance (): number {
    const all = [...this.#known.values()]
    return Math.min(...all.flatMap((one, i) => all.slice(0, i).map(other => difference(one.scores, other.scores))))
  }

  async #measureNoise (server: Server, first: Fingerprint, answers: readonly Answer[]): Promise<void> {
    for (let i = 0; i < 2; i++) {
      const again = await this.fingerprint(server)
      this.#noise.score = Math.max(this.#noise.score, difference(first.scores, again.scores))
    }
    for (const [i, { tokens, logprobs }] of answers.entries()) {
      const prompt = this.prompts[i]!
      const scored = (await server.score([...prompt, ...tokens])).slice(prompt.length - 1)
      this.#noise.output = Math.max(this.#noise.output, difference(logprobs, scored))
    }
  }
}

/** The largest difference; infinite between lists of different lengths. */
export function difference (a: readonly number[], b: readonly number[]): number {
  if (a.length !== b.length) return Infinity
  return a.reduce((most, value, i) => Math.max(most, gap(value, b[i]!)), 0)
}

export function gap (a: number, b: number): number {
  const size = Math.abs(a - b)
  return Number.isNaN(size) ? Infinity : size
}

/** A prompt that depends on its number and positions, of tokens in [3, vocabulary). */
export function makePrompt (seed: number, length: number, vocabulary: number): number[] {
  return Array.from({ length }, (_, i) => 3 + ((seed * 7919 + i * 104_729 + i * i * 31) % (vocabulary - 3)))
}
