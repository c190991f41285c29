import t from 'tap'
import Fastify from 'fastify'
import type { Test } from 'tap'
import type { FastifyInstance } from 'fastify'
import { shutDown } from '../../src/cli/shut-down.ts'
import type { RolloutEngine } from '../../src/contract/rollout-engine.ts'

const log = { info: () => {}, warn: () => {} }

/** A server whose one route runs until `finish` or an abort, and counts as a running request of the engine. */
async function setup (
  t: Test
): Promise<
  {
    app: FastifyInstance
    engine: RolloutEngine
    url: string
    finish: () => void
    events: string[]
    started: Promise<void>
  }
> {
  const events: string[] = []
  const stats = { running: 0, queued: 0 }
  let end: (text: string) => void = () => {}
  let start: () => void = () => {}
  const started = new Promise<void>(resolve => {
    start = resolve
  })
  const engine = {
    stats,
    abortAll: () => {
      events.push('abort')
      end('aborted')
      return 1
    },
    close: async () => {
      events.push('close')
    }
  } as unknown as RolloutEngine
  const app = Fastify()
  app.get('/', async () => {
    stats.running++
    const text = await new Promise<string>(resolve => {
      end = resolve
      start()
    })
    stats.running--
    return text
  })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => await app.close())
  return { app, engine, url, finish: () => end('done'), events, started }
}

t.test('a running request may end within the grace, and new ones are refused', async t => {
  const { app, engine, url, finish, events, started } = await setup(t)
  const running = fetch(url).then(async reply => await reply.text())
  await started
  const down = shutDown(app, engine, 60_000, log as never)
  await t.rejects(fetch(url), 'a new request')
  finish()
  t.equal(await running, 'done')
  await down
  t.same(events, ['close'])
})

t.test('a request that does not end is aborted after the grace period, and its client gets its tokens', async t => {
  const { app, engine, url, events, started } = await setup(t)
  const running = fetch(url).then(async reply => await reply.text())
  await started
  await shutDown(app, engine, 0, log as never)
  t.equal(await running, 'aborted')
  t.same(events, ['abort', 'close'])
})

t.test('an idle server closes at once, even with open connections', async t => {
  const { app, engine, url, events } = await setup(t)
  await (await fetch(url + '/none')).text()
  await shutDown(app, engine, 60_000, log as never)
  t.same(events, ['close'])
})
