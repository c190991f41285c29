import { Type } from 'typebox'
import type { MemoryReport } from '../../src/contract/rollout-engine.ts'
import { queryOrBody } from '../../src/dialects/query-or-body.ts'
import { vllmSleepOf } from '../../src/dialects/vllm/sleep-of.ts'
import type { Routes } from '../../src/http/context.ts'
import { nullable, refusals, unused, WeightsRefusal } from '../../src/http/schemas.ts'
import { InverseCallJoiner } from '../../src/weights/inverse-call-joiner.ts'

const Mode = Type.Union([Type.Literal('abort'), Type.Literal('wait'), Type.Literal('keep')])
const Tags = Type.Union([Type.Array(Type.String()), Type.String()])

const sleepFields = {
  level: nullable(
    Type.Integer({ minimum: 0, maximum: 2 }),
    '0: only pause; 1 (default): weights keep a copy in host memory and come back as they were; 2: they come back empty, and are torn until an update has written them.'
  ),
  mode: nullable(
    Mode,
    'Running requests are ended with what they have (abort, default), finished (wait), or held and computed again once all is awake (keep).'
  )
}
const SleepBody = Type.Object({
  ...sleepFields,
  tags: nullable(Tags, 'weights, kv_cache; default both.'),
  timeout: unused()
}, { title: 'VllmSleepRequest' })
const WakeBody = Type.Object({ tags: nullable(Tags, 'weights, kv_cache; default all that sleeps.') }, {
  title: 'VllmWakeRequest'
})
// A query's single value is made a list.
const SleepQuery = Type.Object({
  ...sleepFields,
  tags: Type.Optional(Type.Array(Type.String(), { description: 'May be given several times.' }))
})
const WakeQuery = Type.Object({
  tags: Type.Optional(Type.Array(Type.String(), { description: 'May be given several times.' }))
})

const Slept = Type.Object({
  status: Type.String(),
  tags: Type.Array(Type.String(), { description: 'Kinds of memory that went or came with this call.' }),
  weights: Type.String({ description: 'current, torn or asleep.' })
}, { description: 'Done, or nothing was to be done.' })

/** vLLM's sleep mode: memory for a trainer on the same machine. */
const vllmSleep: Routes = async (app, { context }) => {
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
      summary: 'Give memory back to the system (vLLM)',
      description:
        'Options by query or by body. Requests are refused with 503 until all is awake. 503 NO_MEMORY, and nothing has changed, where level 1 finds no room for the copy.',
      tags: ['control'],
      querystring: SleepQuery,
      body: SleepBody,
      response: { 200: Slept, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    const { level, mode, tags } = queryOrBody<typeof request.body>(request.query, request.body)
    const wanted = { level: level ?? 1, mode: mode ?? 'abort', tags: list(tags) } as const
    // A client's retry of a call under way gets that one's outcome.
    const report = await calls.join('sleep', JSON.stringify(wanted), async () => await sleeper.sleep(wanted))
    request.log.info({ tags: report.tags, bytes: report.bytes, ms: Math.round(report.ms) }, 'memory released')
    return { status: 'sleeping', tags: report.tags, weights: engine.weights.state }
  })

  app.post('/wake_up', {
    config,
    schema: {
      operationId: 'vllmWakeUp',
      summary: 'Take memory again (vLLM)',
      description:
        'Tags by query or by body. What is awake already is left as it is. A pause that a sleep began ends when all is awake.',
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
      response: { 200: Type.Object({ is_sleeping: Type.Boolean() }, { description: 'Of any kind.' }), ...refusals() }
    }
  }, async () => ({ is_sleeping: sleeper.isSleeping }))
}

export default vllmSleep
