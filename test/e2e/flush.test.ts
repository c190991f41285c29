import t from 'tap'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { prompt, rollout, rolloutRequest } from '../helpers/rollout.ts'

t.test('dropping the cache under paused requests that share pages loses no page and frees none twice', async t => {
  const engine = await createEngine(join(packageRoot, 'models/adder'), { threads: 1, maxTotalTokens: 320 })
  t.teardown(async () => {
    await engine.close()
  })
  const shared = prompt(1, 97, 250)
  // The first request leaves its prompt in the cache, so the next two hold the same pages.
  await rollout(engine, rolloutRequest(shared, { maxNewTokens: 1 }))
  let begun = 0
  let pause = (): void => {}
  const paused = new Promise<void>((resolve, reject) => {
    pause = () => {
      engine.pause('in_place').then(resolve, reject)
    }
  })
  const both = [20, 150].map(async maxNewTokens => {
    let first = true
    return await rollout(engine, rolloutRequest(shared, { maxNewTokens }), () => {
      if (first && ++begun === 2) pause()
      first = false
    })
  })
  await paused
  const update = await engine.update()
  await update.commit({ version: 'the same weights', flushCache: true })
  await engine.resume()
  const others = [3, 4, 5, 6].map(async seed =>
    await rollout(engine, rolloutRequest(prompt(seed, 100, 250), { maxNewTokens: 80 }))
  )
  const ended = await Promise.all([...both, ...others])
  t.same(ended.map(({ tokens }) => tokens.length), [20, 150, 80, 80, 80, 80])
  t.ok(await engine.flushCache(1000))
  const again = await rollout(engine, rolloutRequest(shared, { maxNewTokens: 150 }))
  t.same(again.tokens, ended[1]!.tokens, 'and computed the right tokens all along')
})
