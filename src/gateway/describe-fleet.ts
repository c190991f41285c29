import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'
import { packageVersion } from '../http/version.ts'
import { parsed, readAll } from '../remote/connection.ts'
import { CALLS, REFUSED } from './calls.ts'
import type { Fleet } from './fleet.ts'
import { readHeaders, replyHeaders } from './headers.ts'
import type { Worker } from './worker.ts'

/** What a trainer that takes the gateway for one engine asks about it: sizes are those of all engines. */
export function describeFleet (app: FastifyInstance, fleet: Fleet): void {
  const ranks = (): number => fleet.members.reduce((sum, { ranks }) => sum + ranks, 0)
  const get = (url: string, handler: (request: FastifyRequest, reply: FastifyReply) => Promise<unknown>): void => {
    app.get(url, { exposeHeadRoute: false, config: { auth: 'normal' }, schema: { hide: true } }, handler)
  }

  const changed = (url: string, change: (reply: Record<string, unknown>) => object): void => {
    get(url, async (request, reply) => {
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
            return await reply
              .code(statusCode)
              .headers(replyHeaders(headers))
              .send(bytes)
          }
          return change(info as Record<string, unknown>)
        } catch (error) {
          failure = new RefitError('ENGINE_FAILED', `${worker.url}: ${(error as Error).message}`, { cause: error })
        }
      }
      throw failure
    })
  }
  for (const url of ['/server_info', '/get_server_info']) {
    changed(
      url,
      info => ({
        ...info,
        tp_size: ranks(),
        pp_size: 1,
        ...info['num_gpus'] === undefined ? {} : { num_gpus: ranks() },
        engines: fleet.list
      })
    )
  }
  for (const url of ['/get_world_size', '/get_world_size/']) changed(url, () => ({ world_size: ranks() }))
  changed('/get_tensor_parallel_size/', () => ({ tensor_parallel_size: ranks() }))

  get('/capabilities', async () => {
    const members = fleet.members
    const engine = members.find(({ facts }) => facts?.dialect === 'refit')?.facts?.details['capabilities'] as {
      weights?: object
    } | undefined
    return {
      // What answers as refit does is spoken to as such: nothing that is behind it may be missing then.
      ...members.length > 0 && members.every(({ facts }) => facts?.dialect === 'refit')
        ? { ...engine, weights: { ...engine?.weights, ranks: ranks() } }
        : { server: 'refit gateway' },
      version: packageVersion(),
      dialects: dialectsOf(members),
      gateway: {
        engines: members.map(({ url, facts }) => ({
          url,
          dialect: facts?.dialect ?? null,
          ranks: facts?.ranks ?? null
        })),
        routes: Object.fromEntries(Object.entries(CALLS).map(([path, call]) => [path, call.to])),
        refused: {
          ...REFUSED,
          ...members.length > 1
            ? Object.fromEntries(
              Object.entries(CALLS).flatMap(([path, { alone }]) => alone === undefined ? [] : [[path, alone]])
            )
            : {}
        }
      }
    }
  })
}

/** What all engines speak, and the gateway with them. TRL makes the one engine rank 0 of its group. */
function dialectsOf (members: readonly Worker[]): string[] {
  const spoken = members.map(({ facts }) =>
    facts?.dialect === 'refit'
      ? (facts.details['capabilities'] as { dialects?: string[] }).dialects ?? []
      : [facts?.dialect ?? '', 'openai']
  )
  return (spoken[0] ?? []).filter(name =>
    spoken.every(names => names.includes(name)) && (name !== 'trl' || members.length === 1)
  )
}
