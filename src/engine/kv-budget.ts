import { RefitError } from '../errors.ts'
import type { Architecture } from '../model/architecture.ts'

export interface KvBudgetOptions {
  ranks: number
  /** Bytes of one element of the KV cache. */
  elementBytes: number
  pageSize: number
  contextLength: number
  maxRunningRequests: number
  /** Exact size in tokens, whatever memory there is. */
  maxTotalTokens: number | null
  /** Share of `availableBytes` for weights and KV cache. */
  memFraction: number | null
  /** Memory that can be had now, and what the weights will take of it. */
  availableBytes: number
  weightBytes: number
}

/** Share that is taken where none is given. */
const DEFAULT_FRACTION = 0.5

/** Bytes of KV cache per token over all ranks; a rank holds at least one KV head. */
export function kvBytesPerToken (arch: Architecture, ranks: number, elementBytes: number): number {
  return 2 * arch.layers * Math.max(1, arch.kvHeads / ranks) * ranks * arch.headDim * elementBytes
}

/** KV pages: as many as all running requests could fill at full length, less where memory does not allow it. Throws CONFIG with the numbers. */
export function kvPages (arch: Architecture, options: KvBudgetOptions): number {
  const { pageSize, contextLength, maxRunningRequests, maxTotalTokens, availableBytes, weightBytes } = options
  if (maxTotalTokens !== null) return Math.max(1, Math.floor(maxTotalTokens / pageSize))
  const fraction = options.memFraction ?? DEFAULT_FRACTION
  const pageBytes = kvBytesPerToken(arch, options.ranks, options.elementBytes) * pageSize
  const fitting = Math.floor((availableBytes * fraction - weightBytes) / pageBytes)
  if (fitting < 1) {
    throw new RefitError('CONFIG', `--mem-fraction: ${fraction} of ${megabytes(availableBytes)} free memory holds no KV cache beside ${megabytes(weightBytes)} of weights ` +
      `(a page of ${pageSize} tokens takes ${megabytes(pageBytes)}); raise it, set --max-total-tokens, or free memory`, { param: 'mem-fraction' })
  }
  return Math.min(fitting, maxRunningRequests * Math.ceil(contextLength / pageSize))
}

function megabytes (bytes: number): string {
  return `${(bytes / 1e6).toFixed(1)} MB`
}
