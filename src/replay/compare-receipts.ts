import type { Receipt } from '../http/samples/receipt.ts'

/** Differences of logprobs that other kernels, or another batch on a GPU, can make. */
export const TOLERANCE = 0.05

export interface Comparison {
  equal: boolean
  /** One for each thing that was compared. */
  lines: string[]
}

/** Compares a sample with its repetition. */
export function compareReceipts (first: Receipt, again: Receipt, tolerance = TOLERANCE): Comparison {
  const parts = [weights(first, again), lora(first, again), tokens(first, again), logprobs(first, again, tolerance)]
  return { equal: parts.every(({ equal }) => equal), lines: parts.flatMap(({ line }) => line ?? []) }
}

interface Part {
  equal: boolean
  line?: string
}

function weights (first: Receipt, again: Receipt): Part {
  const [wanted, held] = [first.weights.digest, again.weights.digest]
  const label = again.weight_versions.at(-1)?.version
  const version = label === undefined ? '' : `, version ${JSON.stringify(label)}`
  if (wanted == null) {
    const why = first.weights.state === 'mixed'
      ? 'weights were written while the sample was generated'
      : 'the receipt has no digest, because it was requested after these weights were replaced'
    return { equal: true, line: `weights: not compared: ${why}` }
  }
  if (held == null) return { equal: true, line: 'weights: not compared: this server reports no digest' }
  if (wanted === held) return { equal: true, line: `weights: the same (${held.slice(0, 16)})` }
  return {
    equal: false,
    line: `weights: OTHERS: the sample was made by ${wanted.slice(0, 16)}, here is ${held.slice(0, 16)}${version}`
  }
}

function lora (first: Receipt, again: Receipt): Part {
  if (first.lora === null) return { equal: true }
  const [wanted, held] = [first.lora.digest, again.lora?.digest]
  const equal = wanted === undefined || wanted === held
  return {
    equal,
    line: equal
      ? `adapter: ${first.lora.name}${
        wanted === undefined ? ', not compared: the receipt has no digest' : ', the same'
      }`
      : `adapter: ANOTHER version of ${first.lora.name}: ${wanted.slice(0, 16)}, here ${(held ?? 'none').slice(0, 16)}`
  }
}

function tokens (first: Receipt, again: Receipt): Part {
  const at = firstDifference(first.output_ids, again.output_ids)
  const { length } = first.output_ids
  if (at < 0) return { equal: true, line: `tokens: ${length} of ${length} equal` }
  return {
    equal: false,
    line: `tokens: DIFFERENT from token ${at} on: ${describe(first, at)}; here ${describe(again, at)}`
  }
}

function describe ({ output_ids: ids, logprobs }: Receipt, at: number): string {
  const logprob = logprobs?.[at]
  if (ids[at] === undefined) return `the output ends with ${ids.length} tokens`
  return `${ids[at]}${logprob == null ? '' : ` (logprob ${logprob})`}`
}

function logprobs (first: Receipt, again: Receipt, tolerance: number): Part {
  const [wanted, held] = [first.logprobs, again.logprobs]
  if (wanted === null || held === null) return { equal: true }
  // Behind the first other token, the logprobs are those of another text.
  const end = firstDifference(first.output_ids, again.output_ids)
  const count = end < 0 ? wanted.length : end
  const apart = Array.from({ length: count }, (_, i) => distance(wanted[i], held[i]))
  const most = apart.reduce((a, b) => Math.max(a, b), 0)
  if (!isExact(first, again)) {
    const why = isSame(first, again) ? 'this device does not promise the same bits' : 'the devices differ'
    return {
      equal: most <= tolerance,
      line: `logprobs: at most ${most.toPrecision(3)} apart ${most <= tolerance ? '' : 'which is TOO MUCH '}` +
        `(${why}; ${tolerance} is accepted)`
    }
  }
  const at = apart.findIndex(difference => difference !== 0)
  if (at < 0) return { equal: true, line: `logprobs: ${count} of ${wanted.length} equal, bit for bit` }
  return {
    equal: false,
    line: `logprobs: DIFFERENT at token ${at}: ${wanted[at]}, here ${held[at]} (at most ${most.toPrecision(3)} apart)`
  }
}

function distance (a: number | null | undefined, b: number | null | undefined): number {
  if (a == null || b == null) return (a ?? null) === (b ?? null) ? 0 : Infinity
  return Object.is(a, b) ? 0 : Math.max(Math.abs(a - b), Number.MIN_VALUE)
}

/** The same bits are promised for both together. */
function isExact (first: Receipt, again: Receipt): boolean {
  return first.device.exact && again.device.exact && isSame(first, again)
}

function isSame ({ device: a, program: before }: Receipt, { device: b, program: now }: Receipt): boolean {
  return before === now && a.kind === b.kind && a.isa === b.isa && a.dtype === b.dtype && isSameWidth(a, b)
}

function isSameWidth (a: Receipt['device'], b: Receipt['device']): boolean {
  const [first, again] = [a.any_ranks === true, b.any_ranks === true]
  const anyRanks = first && again
  // One engine gathers activations, the other adds partial sums.
  if (first !== again && a.ranks > 1) return false
  const models = ({ gpus }: Receipt['device']): string => (anyRanks ? [...new Set(gpus)].sort() : gpus).join()
  return (anyRanks || a.ranks === b.ranks) && models(a) === models(b)
}

function firstDifference (a: readonly number[], b: readonly number[]): number {
  for (let i = 0; i < Math.max(a.length, b.length); i++) if (a[i] !== b[i]) return i
  return -1
}
