import t from 'tap'
import { join } from 'node:path'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { rollout } from '../helpers/rollout.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { HALVES, PROMPTS, engineOf, freshResults, requestOf, update, visible, writeModels } from './two-halves.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

// An engine with two sets of weights generates while updates arrive.

for (
  const [tp, disableOverlapSchedule, speculative] of [
    [1, false, 'off'],
    [2, false, 'siblings'],
    [1, true, 'off']
  ] as const
) {
  t.test(
    `tp ${tp}, ${disableOverlapSchedule ? 'without' : 'with'} overlap, guesses ${speculative}: through many ` +
      'swaps each token is of the weights that its version names',
    async t => {
      const models = writeModels(t)
      const options = { tp, disableOverlapSchedule }
      const fresh = await freshResults(models, options)
      const engine = await engineOf(t, models.whole('aa'), {
        ...options,
        speculative,
        weightVersion: 'aa',
        shadowWeights: true
      })
      const running = new Set([0])
      const pure = new Map<string, number>()
      let mixed = 0
      const generate = async (from: number): Promise<void> => {
        for (let turn = from; running.size > 0; turn++) {
          const index = turn % PROMPTS.length
          const got = await rollout(engine, requestOf(index))
          const label = got.versions[0]!
          const { tokens, logprobs } = fresh.get(label)!.rollouts[index]!
          // A label can come back while a request runs.
          const other = got.versions.findIndex(version => version !== label)
          const same = other < 0 ? got.tokens.length : other
          t.strictSame(got.tokens.slice(0, same), tokens.slice(0, same), `prompt ${index} of ${label}`)
          t.strictSame(got.logprobs.slice(0, same), logprobs.slice(0, same))
          if (same === got.tokens.length) pure.set(label, (pure.get(label) ?? 0) + 1)
          else mixed++
        }
      }
      const streams = [0, 1, 2, 3].map(async from => {
        await generate(from)
      })
      let label = 'aa'
      const order = [0, 1, 0, 0, 1, 1, 0, 1]
      for (let swap = 0; swap < 40; swap++) {
        const other = (variant: string): string => variant === 'a' ? 'b' : 'a'
        let folder: string
        if (swap % 10 === 9) {
          label = [...label].map(other).join('')
          folder = models.whole(label)
        } else {
          const half = order[swap % order.length]!
          label = half === 0 ? other(label[0]!) + label[1]! : label[0]! + other(label[1]!)
          folder = models.half(half, label[half]!)
        }
        await update(engine, models.root, folder, label)
        t.equal(engine.weightVersion, label)
        t.strictSame(await engine.checksums(), fresh.get(label)!.checksums, `swap ${swap}`)
      }
      running.clear()
      await Promise.all(streams)
      t.equal(engine.epoch, 41)
      t.ok(pure.size === HALVES.length, `requests within one version: ${JSON.stringify([...pure])}`)
      t.ok(mixed > 0, 'requests went on through a swap')
      t.comment(`${mixed} mixed, ${JSON.stringify([...pure])}`)
    }
  )
}

t.test('an update that breaks off at any read changes no token of the requests that run', async t => {
  const models = writeModels(t)
  const engine = await engineOf(t, models.whole('aa'), { weightVersion: 'aa', shadowWeights: true })
  const before = await engine.checksums()
  const expected = await rollout(engine, requestOf(1, 40))
  const arm = native().armFault!
  t.teardown(() => {
    arm(null)
  })
  let failures = 0
  for (let at = 1;; at++) {
    const running = rollout(engine, requestOf(1, 40))
    arm({ point: 'read', at, action: 'fail' })
    const updating = update(engine, models.root, models.whole('bb'), 'bb')
    const error = await updating.then(() => null, (error: unknown) => error)
    arm(null)
    const got = await running
    if (error === null) break
    failures++
    t.match(error, { code: 'CHECKPOINT_FORMAT', message: /have not changed|before anything was written/ })
    t.strictSame(visible(got), visible(expected), `failure ${at}`)
    t.equal(got.versions.at(-1), 'aa')
    t.equal(engine.weightVersion, 'aa')
    t.same(engine.weights, { state: 'current' })
    t.strictSame(await engine.checksums(), before)
  }
  t.ok(failures >= before.tensors.length, `${failures} failures`)
  t.equal(engine.weightVersion, 'bb')
})

t.test('requests that run go on through a swap, and new ones never hit KV of the old weights', async t => {
  const models = writeModels(t)
  const fresh = await freshResults(models, {})
  const engine = await engineOf(t, models.whole('aa'), { weightVersion: 'aa', shadowWeights: true })
  const hurry = slowSteps(t, 4, 20)
  let swapped: Promise<void> | undefined
  const got = await rollout(engine, requestOf(4, 60), event => {
    if (event.completionTokens >= 5) swapped ??= update(engine, models.root, models.whole('bb'), 'bb').then(hurry)
  })
  await swapped
  t.equal(got.tokens.length, 60)
  t.same([...new Set(got.versions)], ['aa', 'bb'], 'it was not ended, and not computed again')
  t.equal(got.last.retractions, 0)
  const next = await rollout(engine, requestOf(4))
  t.equal(next.last.cachedTokens, 0)
  t.strictSame(visible(next), visible(fresh.get('bb')!.rollouts[4]!))
})

t.test('an engine that sleeps gives both sets back, and the second comes with the next update', async t => {
  const models = writeModels(t)
  const fresh = await freshResults(models, {})
  const engine = await engineOf(t, models.whole('aa'), {
    weightVersion: 'aa',
    shadowWeights: true,
    enableWeightsCpuBackup: true
  })
  await update(engine, models.root, models.half(0, 'b'), 'ba')
  t.match(engine.weightSets, { live: 1, shadow: { state: 'idle' } })
  const { bytes } = await engine.releaseMemory(['weights'])
  t.ok(bytes >= engine.info.weightBytes + engine.weightSets!.shadow.bytes)
  t.equal(engine.weightSets?.shadow.state, 'absent')
  await engine.resumeMemory()
  t.equal(engine.weightSets?.shadow.state, 'absent')
  t.strictSame(visible(await rollout(engine, requestOf(2))), visible(fresh.get('ba')!.rollouts[2]!))
  await update(engine, models.root, models.half(1, 'b'), 'bb')
  t.match(engine.weightSets, { live: 0, shadow: { state: 'idle' } })
  t.strictSame(await engine.checksums(), fresh.get('bb')!.checksums)
  t.strictSame(visible(await rollout(engine, requestOf(2))), visible(fresh.get('bb')!.rollouts[2]!))
})
