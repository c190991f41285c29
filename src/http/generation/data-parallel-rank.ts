import type { IncomingHttpHeaders } from 'node:http'
import { invalid } from '../refuse.ts'

/** vLLM's and SGLang's header with the data-parallel rank of a request. */
export const RANK_HEADER = 'x-data-parallel-rank'

/** The rank that the header names; undefined without one. Throws INVALID_REQUEST unless it is one of `ranks`. */
export function rankOf ({ [RANK_HEADER]: value }: IncomingHttpHeaders, ranks: number): number | undefined {
  return value === undefined ? undefined : checkRank(Number(value === '' ? NaN : value), ranks, 'X-data-parallel-rank')
}

export function checkRank (rank: unknown, ranks: number, param: string): number {
  if (Number.isInteger(rank) && (rank as number) >= 0 && (rank as number) < ranks) return rank as number
  const known = ranks === 1 ? '0, the only data-parallel rank' : `a data-parallel rank from 0 to ${ranks - 1}`
  throw invalid(param, `expected ${known}, got ${Number.isNaN(rank) ? 'no number' : JSON.stringify(rank)}`)
}
