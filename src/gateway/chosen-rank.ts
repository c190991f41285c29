import type { IncomingHttpHeaders } from 'node:http'
import { checkRank, RANK_HEADER, rankOf } from '../http/generation/data-parallel-rank.ts'
import { JsonBody } from './json-body.ts'
import type { Fleet } from './fleet.ts'
import type { Worker } from './worker.ts'
import { requestHeaders } from './headers.ts'

// A data-parallel rank of the gateway is the place of an engine in /workers, from 0.

/** In order of precedence; the second is SGLang's old name. */
const FIELDS = ['routed_dp_rank', 'data_parallel_rank']

interface Chosen {
  /** Undefined: any engine. */
  only: Worker | undefined
  headers: Record<string, string | string[]>
  body: Buffer
}

/** The engine that a request names by rank, and the request without the rank: an engine has only rank 0. */
export function chosenRank (fleet: Fleet, headers: IncomingHttpHeaders, body: Buffer): Chosen {
  const plain = requestHeaders(headers)
  const ranks = Math.max(1, fleet.list.length)
  const named = rankOf(headers, ranks)
  const json = new JsonBody(body)
  const fields = body.includes('_rank"') ? FIELDS.filter(name => json.has(name)) : []
  const inBody = fields.map(name => checkRank(json.get(name), ranks, name))[0]
  const rank = named ?? inBody
  if (rank === undefined) return { only: undefined, headers: plain, body }
  delete plain[RANK_HEADER]
  delete plain['content-length']
  return {
    only: fleet.list[rank],
    headers: plain,
    body: Buffer.concat(json.with(fields.map(name => ({ at: [name], value: '0' }))))
  }
}
