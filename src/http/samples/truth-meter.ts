import { RefitError } from '../../errors.ts'
import type { KeptSample, KeptSamples } from './kept-samples.ts'
import { DifferenceTally } from './difference-tally.ts'
import type { Differences } from './difference-tally.ts'

/** Logprobs are at most 0. Those of a trainer's 16-bit formats can be above it by their rounding. */
const ROUNDING = 0.1

/** Weight versions that are reported one by one. */
export const VERSIONS = 16

/** A trainer's logprobs of the output of a sample. */
export interface Claim {
  id: string
  logprobs: readonly number[]
  /** The output as the trainer knows it. */
  outputIds?: readonly number[] | undefined
}

/** Differences of the tokens that one weight version made. */
export interface VersionDifferences extends Differences {
  version: string
}

export interface TruthReport {
  samples: number
  tokens: number
  /** Ids that are not kept. */
  unknown: string[]
  /** Samples that were counted before, and are not counted again. */
  repeated: number
  all: Differences
  versions: VersionDifferences[]
}

/**
 * Compares a trainer's logprobs with those that the engine reported for the same tokens: the distance between the
 * policy that samples and the policy that learns. It keeps sums for the last versions, and for all.
 */
export class TruthMeter {
  readonly #samples: KeptSamples
  /** The oldest first. */
  readonly #versions = new Map<string, DifferenceTally>()
  readonly all = new DifferenceTally()
  samples = 0
  warnings = 0

  constructor (samples: KeptSamples) {
    this.#samples = samples
  }

  /** The newest version that was measured. */
  get newest (): VersionDifferences | null {
    const [version, tally] = [...this.#versions].at(-1) ?? []
    return tally === undefined ? null : { version: version!, ...tally.values }
  }

  get versions (): VersionDifferences[] {
    return [...this.#versions].map(([version, tally]) => ({ version, ...tally.values }))
  }

  /** Counts nothing if one of the claims is refused. */
  measure (claims: readonly Claim[]): TruthReport {
    const found: { sample: KeptSample, claim: Claim }[] = []
    const unknown: string[] = []
    let repeated = 0
    const seen = new Set<string>()
    for (const [index, claim] of claims.entries()) {
      const sample = this.#samples.get(claim.id)
      if (sample !== undefined) check(claim, sample, index)
      if (sample === undefined) unknown.push(claim.id)
      else if (sample.isMeasured || seen.has(claim.id)) repeated++
      else found.push({ sample, claim })
      seen.add(claim.id)
    }
    const all = new DifferenceTally()
    const versions = new Map<string, DifferenceTally>()
    for (const { sample, claim } of found) {
      sample.isMeasured = true
      for (const { version, start, end } of sample.spans) {
        const tally = versions.get(version) ?? new DifferenceTally()
        versions.set(version, tally)
        for (let i = start; i < end; i++) tally.add(claim.logprobs[i]! - sample.logprobs![i]!)
      }
    }
    for (const [version, tally] of versions) {
      all.addAll(tally)
      this.#version(version).addAll(tally)
    }
    this.all.addAll(all)
    this.samples += found.length
    return {
      samples: found.length,
      tokens: all.tokens,
      unknown,
      repeated,
      all: all.values,
      versions: [...versions].map(([version, tally]) => ({ version, ...tally.values }))
    }
  }

  #version (version: string): DifferenceTally {
    let tally = this.#versions.get(version)
    if (tally === undefined) {
      this.#versions.set(version, tally = new DifferenceTally())
      const [oldest] = this.#versions.keys()
      if (this.#versions.size > VERSIONS) this.#versions.delete(oldest!)
    }
    return tally
  }
}

function check ({ id, logprobs, outputIds }: Claim, sample: KeptSample, index: number): void {
  const param = `samples[${index}].logprobs`
  const refuse = (message: string, at = param): RefitError =>
    new RefitError('INVALID_REQUEST', `${at}: sample ${JSON.stringify(id)} ${message}`, { param: at })
  if (sample.logprobs === null) throw refuse('was generated without "return_logprob", so there is nothing to compare')
  if (logprobs.length !== sample.outputIds.length) {
    throw refuse(`has ${sample.outputIds.length} output tokens, got ${logprobs.length} logprobs`)
  }
  const bad = logprobs.findIndex(value => !Number.isFinite(value))
  if (bad >= 0) throw refuse(`has no finite logprob at ${bad}`)
  const positive = logprobs.findIndex(value => value > ROUNDING)
  if (positive >= 0) {
    throw refuse(`has a logprob of at most 0 at ${positive}, got ${logprobs[positive]}: send log p, not its negative`)
  }
  if (outputIds === undefined) return
  const other = outputIds.length === sample.outputIds.length
    ? outputIds.findIndex((token, i) => token !== sample.outputIds[i])
    : Math.min(outputIds.length, sample.outputIds.length)
  if (other < 0) return
  const [sent, own] = [outputIds[other] ?? 'nothing', sample.outputIds[other] ?? 'nothing']
  throw refuse(`has other tokens here: token ${other} is ${own}, got ${sent}`, `samples[${index}].output_ids`)
}
