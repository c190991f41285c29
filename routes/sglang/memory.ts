import { Type } from 'typebox'
import type { FastifyReply, FastifyRequest } from 'fastify'
import type { MemoryReport, MemoryTag } from '../../src/contract/rollout-engine.ts'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { getBody } from '../../src/http/get-body.ts'
import { refusals } from '../../src/http/schemas.ts'
import { bodyCheck } from '../../src/http/validation.ts'
import { InverseCallJoiner } from '../../src/weights/inverse-call-joiner.ts'

const Tag = Type.Union([Type.Literal('weights'), Type.Literal('kv_cache'), Type.Literal('cuda_graph')])
const MemoryBody = Type.Object({
  tags: Type.Optional(
    Type.Union([Type.Array(Tag), Tag, Type.Null()], {
      description: 'Kinds of memory. Without tags, or with null or an empty list: all kinds that the call applies to.'
    })
  )
}, { title: 'MemoryRequest' })
const Query = Type.Object({
  tags: Type.Optional(Type.Array(Type.String(), { description: 'May be given several times.' }))
})
const Done = Type.Null({ description: 'Done; null, as in SGLang.' })

const ROUTES = [
  {
    path: '/release_memory_occupation',
    operation: 'releaseMemoryOccupation',
    summary: 'Release memory to the system',
    description: 'Addresses stay the same. Waits for running requests. If generation is paused, ' +
      'held requests stay and are computed again later. ' +
      'Requests are refused with 503 until all memory is back. ' +
      '409 for a kind that is released already, and for kv_cache while a pause in place holds requests.',
    log: 'memory released'
  },
  {
    path: '/resume_memory_occupation',
    operation: 'resumeMemoryOccupation',
    summary: 'Restore released memory',
    description: 'Weights are torn until an update writes them, unless the server keeps a copy ' +
      '(--enable-weights-cpu-backup). ' +
      '409 for a kind that is not released. 503 if there is not enough memory; ' +
      'kinds that could not be restored stay released.',
    log: 'memory resumed'
  }
] as const

/** Release and resume of memory, for trainers that share the machine with the engine (docs/memory.md). */
const memory: Routes<ServerContext> = async (app, { context }) => {
  const { engine } = context
  const check = bodyCheck(MemoryBody)
  const calls = new InverseCallJoiner<MemoryReport>()

  for (const { path, operation, summary, description, log } of ROUTES) {
    const run = async (
      request: FastifyRequest,
      reply: FastifyReply,
      { tags }: Type.Static<typeof MemoryBody>
    ): Promise<FastifyReply> => {
      const wanted: MemoryTag[] = tags == null ? [] : typeof tags === 'string' ? [tags] : tags
      // A client's retry of a running call gets the outcome of that call.
      const report = await calls.join(path, [...wanted].sort().join(), async () => {
        return await (path === '/release_memory_occupation'
          ? engine.releaseMemory(wanted)
          : engine.resumeMemory(wanted))
      })
      request.log.info({ tags: report.tags, bytes: report.bytes, ms: Math.round(report.ms) }, log)
      return reply.type('application/json').send('null')
    }
    const schema = { summary, description, tags: ['control'], response: { 200: Done, ...refusals() } }
    app.get(path, {
      exposeHeadRoute: false,
      config: { auth: 'admin', ownHeader: true },
      schema: {
        ...schema,
        operationId: `${operation}Get`,
        summary: `${summary} (as POST; by query or by a JSON body)`,
        querystring: Query
      }
    }, async (request, reply) => await run(request, reply, await getBody(request, check)))
    app.post(path, {
      config: { auth: 'admin' },
      schema: { ...schema, operationId: operation, body: MemoryBody }
    }, async (request, reply) => await run(request, reply, request.body))
  }
}

export default memory
