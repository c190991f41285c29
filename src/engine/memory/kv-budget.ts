import { RefitError } from '../../errors.ts'
import type { Architecture } from '../../model/architecture.ts'

export interface KvBudgetOptions {
  /** Bytes of one page in the memory that is divided. */
  pageBytes: number
  pageSize: number
  contextLength: number
  maxRunningRequests: number
  /** Exact size in tokens, regardless of the memory. */
  maxTotalTokens: number | null
  /** Fraction of `availableBytes` that may be used. */
  memFraction: number
  /** Available memory in bytes, and its name in messages. */
  availableBytes: number
  where: string
  /** Other memory within the fraction: weights, and buffers of a step. */
  weightBytes: number
  otherBytes: number
  /** A second set of weights, which lies within the fraction too (default none). */
  spareBytes?: number
}

/** Bytes of KV cache per token, over all ranks. A rank holds at least one KV head. */
export function kvBytesPerToken (arch: Architecture, ranks: number, elementBytes: number): number {
  return 2 * arch.layers * Math.max(1, arch.kvHeads / ranks) * ranks * arch.headDim * elementBytes
}

/**
 * Number of KV pages: enough for all running requests at full length, or as many as memory allows. Throws CONFIG with
 * the numbers.
 */
export function kvPages (options: KvBudgetOptions): number {
  const {
    pageBytes,
    pageSize,
    contextLength,
    maxRunningRequests,
    maxTotalTokens,
    availableBytes,
    memFraction,
    weightBytes,
    otherBytes,
    spareBytes = 0
  } = options
  if (maxTotalTokens !== null) return Math.max(1, Math.floor(maxTotalTokens / pageSize))
  const fitting = Math.floor((availableBytes * memFraction - weightBytes - spareBytes - otherBytes) / pageBytes)
  if (fitting < 1) {
    const others = otherBytes === 0 ? '' : ` and ${megabytes(otherBytes)} of buffers`
    const spare = spareBytes === 0 ? '' : `, ${megabytes(spareBytes)} of --shadow-weights`
    throw new RefitError(
      'CONFIG',
      `--mem-fraction: ${memFraction} of ${megabytes(availableBytes)} ${options.where} holds no KV cache beside ${
        megabytes(weightBytes)
      } of weights${spare}${others} ` +
        `(a page of ${pageSize} tokens takes ${
          megabytes(pageBytes)
        }); raise it, set --max-total-tokens, or free memory`,
      { param: 'mem-fraction' }
    )
  }
  return Math.min(fitting, maxRunningRequests * Math.ceil(contextLength / pageSize))
}

function megabytes (bytes: number): string {
  return `${(bytes / 1e6).toFixed(1)} MB`
}
