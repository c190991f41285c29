import type { FastifyReply, FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'
import { packageVersion } from '../http/version.ts'
import { parsed, readAll } from '../remote/connection.ts'
import type { CallTable } from './call-table.ts'
import type { Fleet } from './fleet.ts'
import type { GatewayCall } from './gateway-call.ts'
import { readHeaders, replyHeaders } from './headers.ts'
import type { Worker } from './worker.ts'

// Replies for a trainer that takes the gateway for one engine: sizes are those of all engines together.

/** Handles a GET with one engine's reply, changed so that it describes the whole fleet. */
export function describeFleet (
  fleet: Fleet,
  describe: NonNullable<GatewayCall['describe']>
): (request: FastifyRequest, reply: FastifyReply) => Promise<unknown> {
  return async (request, reply) => {
    let failure = fleet.noEngine()
    for (const worker of fleet.ready.length > 0 ? fleet.ready : fleet.served) {
      try {
        const { statusCode, headers, body } = await worker.connection.request({
          method: 'GET',
          path: request.url,
          headers: readHeaders(request.headers)
        })
        const bytes = await readAll(body)
        const info = parsed(String(bytes))
        if (statusCode >= 400 || typeof info !== 'object' || info === null) {
          return await reply.code(statusCode).headers(replyHeaders(headers)).send(bytes)
        }
        return describe(info as Record<string, unknown>, { ranks: ranksOf(fleet), engines: fleet.list })
      } catch (error) {
        failure = new RefitError('ENGINE_FAILED', `${worker.url}: ${(error as Error).message}`, { cause: error })
      }
    }
    throw failure
  }
}

/** The reply of `GET /capabilities`. */
export function reportCapabilities (fleet: Fleet, { calls, refused, oneEngineDialects }: CallTable): object {
  const members = fleet.members
  const engine = members.find(({ facts }) => facts?.kind === 'refit')?.facts?.details['capabilities'] as {
    weights?: object
  } | undefined
  const isAllRefit = members.length > 0 && members.every(({ facts }) => facts?.kind === 'refit')
  const passed = Object.entries(calls).filter(([, { describe }]) => describe === undefined)
  return {
    // Clients use everything that refit offers when the reply is a refit engine's, so every engine behind the gateway
    // must be one.
    ...isAllRefit
      ? { ...engine, weights: { ...engine?.weights, ranks: ranksOf(fleet) } }
      : { server: 'refit gateway' },
    version: packageVersion(),
    dialects: commonDialects(members, oneEngineDialects),
    gateway: {
      engines: members.map(({ url, facts }) => ({ url, dialect: facts?.kind ?? null, ranks: facts?.ranks ?? null })),
      routes: Object.fromEntries(passed.map(([path, { to }]) => [path, to])),
      refused: {
        ...refused,
        ...members.length > 1
          ? Object.fromEntries(
            passed.flatMap(([path, { oneEngineOnly }]) => oneEngineOnly === undefined ? [] : [[path, oneEngineOnly]])
          )
          : {}
      }
    }
  }
}

function ranksOf ({ members }: Fleet): number {
  return members.reduce((sum, { ranks }) => sum + ranks, 0)
}

/** The dialects that every engine serves, without those that work for one engine only if there are more. */
function commonDialects (members: readonly Worker[], oneEngineDialects: ReadonlySet<string>): string[] {
  const served = members.map(({ facts }) =>
    facts?.kind === 'refit'
      ? (facts.details['capabilities'] as { dialects?: string[] }).dialects ?? []
      : [facts?.kind ?? '', 'openai']
  )
  return (served[0] ?? []).filter(name =>
    served.every(names => names.includes(name)) && (!oneEngineDialects.has(name) || members.length === 1)
  )
}
