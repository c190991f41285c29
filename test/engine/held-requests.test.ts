import t from 'tap'
import { serve, until } from '../helpers/load-from.ts'
import { rolloutRequest } from '../helpers/rollout.ts'

t.test('a request that a pause in place held and that has ended does not prevent a release of memory', async t => {
  const { engine } = await serve(t, 'adder-base')
  const request = rolloutRequest([3, 4, 5, 6], { maxNewTokens: 100 })
  const events = engine.generate(request)[Symbol.asyncIterator]()
  await events.next()
  await engine.pause('in_place')
  t.equal(engine.stats.running, 1)
  engine.abortAll()
  const outcome = await engine.releaseMemory(['kv_cache']).then(() => 'released', (error: Error) => error.message)
  t.equal(outcome, 'released')
  await until(() => engine.stats.running === 0)
})
