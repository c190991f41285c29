import { RefitError } from '../errors.ts'
import type { Architecture } from '../model/architecture.ts'

export interface KvBudgetOptions {
  /** Bytes of one page in the memory that is shared out. */
  pageBytes: number
  pageSize: number
  contextLength: number
  maxRunningRequests: number
  /** Exact size in tokens, whatever memory there is. */
  maxTotalTokens: number | null
  /** Share of `availableBytes` that may be taken. */
  memFraction: number
  /** Memory that can be had now, and its name in messages. */
  availableBytes: number
  where: string
  /** What else goes into the share: weights, and buffers of a step. */
  weightBytes: number
  otherBytes: number
}

/** Bytes of KV cache per token over all ranks; a rank holds at least one KV head. */
export function kvBytesPerToken (arch: Architecture, ranks: number, elementBytes: number): number {
  return 2 * arch.layers * Math.max(1, arch.kvHeads / ranks) * ranks * arch.headDim * elementBytes
}

/** KV pages: as many as all running requests could fill at full length, less where memory does not allow it. Throws CONFIG with the numbers. */
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
    otherBytes
  } = options
  if (maxTotalTokens !== null) return Math.max(1, Math.floor(maxTotalTokens / pageSize))
  const fitting = Math.floor((availableBytes * memFraction - weightBytes - otherBytes) / pageBytes)
  if (fitting < 1) {
    const others = otherBytes === 0 ? '' : ` and ${megabytes(otherBytes)} of buffers`
    throw new RefitError(
      'CONFIG',
      `--mem-fraction: ${memFraction} of ${megabytes(availableBytes)} ${options.where} holds no KV cache beside ${
        megabytes(weightBytes)
      } of weights${others} ` +
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
