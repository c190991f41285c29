import { join } from 'node:path'
import t from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { rollout } from '../helpers/rollout.ts'
import type { Rollout } from '../helpers/rollout.ts'
import { until } from '../helpers/transaction-server.ts'
import { engineOf, freshResults, requestOf, update, visible, writeModels } from './two-halves.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

// A step fails while old and new requests take turns: one kind ends with an error, the other bit for bit as ever.

for (
  const [point, tp, disableOverlapSchedule] of [
    ['result', 1, false],
    ['result', 2, false],
    ['result', 1, true],
    ['begin', 1, false]
  ] as const
) {
  const how = point === 'begin' ? 'that cannot begin' : 'whose result is lost'
  t.test(`a step ${how}, tp ${tp}, ${disableOverlapSchedule ? 'without' : 'with'} overlap`, async t => {
    const models = writeModels(t)
    const options = { tp, disableOverlapSchedule }
    const fresh = await freshResults(models, options)
    const engine = await engineOf(t, models.whole('aa'), { ...options, weightVersion: 'aa', shadowWeights: true })
    t.teardown(() => {
      native().armFault!(null)
    })
    const failed = { old: 0, new: 0 }
    let label = 'aa'
    for (let at = 1; at <= 10; at++) {
      const next = at % 2 === 1 ? 'bb' : 'aa'
      const old = [0, 1].map(async index => await settledRollout(rollout(engine, requestOf(index, 2000))))
      await until(() => engine.stats.running === 2)
      // Until the fault is armed.
      await engine.pause('in_place')
      await update(engine, models.root, models.half(0, next[0]!), 'between', 'finish_old')
      t.match(engine.weightSets, { shadow: { state: 'old' }, oldRequests: 2 })
      const now = [0, 1].map(async index => await settledRollout(rollout(engine, requestOf(index))))
      await until(() => engine.stats.queued === 2)
      native().armFault!({ point, at, action: 'fail' })
      await engine.resume()
      const ends = { old: [] as (Rollout | Error)[], new: await Promise.all(now) }
      engine.abortAll()
      ends.old = await Promise.all(old)
      native().armFault!(null)
      const errors = (side: 'old' | 'new') => ends[side].filter(end => end instanceof Error)
      const side = errors('old').length > 0 ? 'old' : 'new'
      failed[side]++
      t.equal(errors(side).length, 2, `step ${at} failed on ${side}`)
      for (const error of errors(side)) t.match(error, { code: 'INTERNAL', message: /the device failed in a step/ })
      t.equal(errors(side === 'old' ? 'new' : 'old').length, 0)
      if (side === 'old') {
        const mixed = `${next[0]!}${label[1]!}`
        for (const [index, end] of ends.new.entries()) {
          t.strictSame(visible(end as Rollout), visible(fresh.get(mixed)!.rollouts[index]!), mixed)
        }
      } else for (const end of ends.old) t.same([...new Set((end as Rollout).versions)], [label])
      await until(() => engine.weightSets!.shadow.state === 'idle')
      // Two updates in a row: the sets are whole, and nothing of the requests is left.
      await update(engine, models.root, models.half(1, next[1]!), next, 'finish_old')
      t.same(await engine.checksums(), fresh.get(next)!.checksums)
      label = next
      await engine.dropCache()
      t.match(engine.stats, { usedTokens: 0, running: 0, queued: 0, onOldWeights: 0 })
      t.match(engine.weights, { state: 'current' })
    }
    t.ok(failed.old > 1 && failed.new > 1, JSON.stringify(failed))
  })
}

async function settledRollout (running: Promise<Rollout>): Promise<Rollout | Error> {
  return await running.catch((error: unknown) => error as Error)
}
