import { Type } from 'typebox'
import type { MemoryReport } from '../../src/contract/rollout-engine.ts'
import { queryOrBody } from '../../src/dialects/query-or-body.ts'
import { vllmSleepOf } from '../../src/dialects/vllm/sleep-of.ts'
import type { ServerContext, Routes } from '../../src/http/context.ts'
import { nullable, refusals, unused, WeightsRefusal } from '../../src/http/schemas.ts'
import { InverseCallJoiner } from '../../src/weights/inverse-call-joiner.ts'

const Mode = Type.Union([Type.Literal('abort'), Type.Literal('wait'), Type.Literal('keep')])
const Tags = Type.Union([Type.Array(Type.String()), Type.String()])

const sleepFields = {
  level: nullable(
    Type.Integer({ minimum: 0, maximum: 2 }),
    '0: only pause; 1 (default): weights are copied to host memory and restored; 2: ' +
      'weights come back empty and are torn until an update has written them.'
  ),
  mode: nullable(
    Mode,
    'Running requests end with their tokens so far (abort, default), are finished (wait), or are held and computed ' +
      'again after wake-up (keep).'
  )
}
const SleepBody = Type.Object({
  ...sleepFields,
  tags: nullable(Tags, 'weights, kv_cache; default both.'),
  timeout: unused()
}, { title: 'VllmSleepRequest' })
const WakeBody = Type.Object({ tags: nullable(Tags, 'weights, kv_cache; default: everything that sleeps.') }, {
  title: 'VllmWakeRequest'
})
// A single value in the query becomes a list.
const SleepQuery = Type.Object({
  ...sleepFields,
  tags: Type.Optional(Type.Array(Type.String(), { description: 'May be given several times.' }))
})
const WakeQuery = Type.Object({
  tags: Type.Optional(Type.Array(Type.String(), { description: 'May be given several times.' }))
})

const Slept = Type.Object({
  status: Type.String(),
  tags: Type.Array(Type.String(), { description: 'Kinds of memory that this call released or restored.' }),
  weights: Type.String({ description: 'current, torn or asleep.' })
}, { description: 'Done, or there was nothing to do.' })

/** vLLM's sleep mode, which frees memory for a trainer on the same machine. */
const vllmSleep: Routes<ServerContext> = async (app, { context }) => {
  const { engine } = context
  const sleeper = vllmSleepOf(engine)
  const calls = new InverseCallJoiner<MemoryReport>()
  const config = { auth: 'admin', errors: 'weights' } as const
  const list = (tags: string | string[] | null | undefined): string[] =>
    tags == null ? [] : typeof tags === 'string' ? [tags] : tags

  app.post('/sleep', {
    config,
    schema: {
      operationId: 'vllmSleep',
      summary: 'Release memory (vLLM)',
      description: 'Options in the query or in the body. Requests are refused with 503 until all memory is back. ' +
        '503 NO_MEMORY without any change if level 1 finds no room for the copy.',
      tags: ['control'],
      querystring: SleepQuery,
      body: SleepBody,
      response: { 200: Slept, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { level, mode, tags } = queryOrBody<typeof request.body>(request.query, request.body)
    const wanted = { level: level ?? 1, mode: mode ?? 'abort', tags: list(tags) } as const
    // A client's retry joins the running call.
    const report = await calls.join('sleep', JSON.stringify(wanted), async () => await sleeper.sleep(wanted))
    request.log.info({ tags: report.tags, bytes: report.bytes, ms: Math.round(report.ms) }, 'memory released')
    return { status: 'sleeping', tags: report.tags, weights: engine.weights.state }
  })

  app.post('/wake_up', {
    config,
    schema: {
      operationId: 'vllmWakeUp',
      summary: 'Restore memory (vLLM)',
      description: 'Tags in the query or in the body. Memory that is back already stays unchanged. ' +
        'A pause that a sleep began ends when all memory is back.',
      tags: ['control'],
      querystring: WakeQuery,
      body: WakeBody,
      response: { 200: Slept, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const tags = list(queryOrBody<typeof request.body>(request.query, request.body).tags)
    const report = await calls.join('wake', [...tags].sort().join(), async () => await sleeper.wake(tags))
    request.log.info({ tags: report.tags, bytes: report.bytes, ms: Math.round(report.ms) }, 'memory resumed')
    return { status: 'awake', tags: report.tags, weights: engine.weights.state }
  })

  app.get('/is_sleeping', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'vllmIsSleeping',
      summary: 'Whether memory is released (vLLM)',
      tags: ['control'],
      response: {
        200: Type.Object({ is_sleeping: Type.Boolean() }, { description: 'True if memory of any kind is released.' }),
        ...refusals()
      }
    }
  }, async () => ({ is_sleeping: sleeper.isSleeping }))
}

export default vllmSleep
