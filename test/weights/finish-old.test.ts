import t from 'tap'
import { join } from 'node:path'
import { packageRoot } from '../../src/root.ts'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { rollout } from '../helpers/rollout.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { serve, until } from '../helpers/transaction-server.ts'
import { engineOf, freshResults, HALVES, PROMPTS, requestOf, update, visible, writeModels } from './two-halves.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

// Two versions are alive: requests that have started finish on the weights before an update; new ones use the new.

const ENDLESS = { max_new_tokens: 2000, ignore_eos: true }

for (
  const [tp, disableOverlapSchedule, speculative] of [
    [1, false, 'off'],
    [2, false, 'siblings'],
    [1, true, 'off']
  ] as const
) {
  t.test(
    `tp ${tp}, ${disableOverlapSchedule ? 'without' : 'with'} overlap, guesses ${speculative}: through many ` +
      'updates every request is of one version, bit for bit as from an engine that was loaded with it',
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
      let seenOld = 0
      const pure = new Map<string, number>()
      const generate = async (from: number): Promise<void> => {
        for (let turn = from; running.size > 0; turn++) {
          const index = turn % PROMPTS.length
          const got = await rollout(engine, requestOf(index))
          const [label] = got.versions
          t.same([...new Set(got.versions)], [label])
          t.strictSame(visible(got), visible(fresh.get(label!)!.rollouts[index]!), `prompt ${index} of ${label!}`)
          t.equal(got.last.retractions, 0)
          pure.set(label!, (pure.get(label!) ?? 0) + 1)
        }
      }
      const streams = [0, 1, 2, 3].map(async from => {
        await generate(from)
      })
      const other = (variant: string): string => variant === 'a' ? 'b' : 'a'
      let label = 'aa'
      for (let swap = 0; swap < 24; swap++) {
        const half = swap % 3 === 0 ? 0 : 1
        label = half === 0 ? other(label[0]!) + label[1]! : label[0]! + other(label[1]!)
        await update(engine, models.root, models.half(half, label[half]!), label, 'finish_old')
        if (engine.weightSets!.shadow.state === 'old') seenOld++
        t.strictSame(await engine.checksums(), fresh.get(label)!.checksums, `update ${swap}`)
      }
      running.clear()
      await Promise.all(streams)
      t.equal(pure.size, HALVES.length, JSON.stringify([...pure]))
      t.ok(seenOld > 0, `${seenOld} updates left requests on old weights`)
      if (speculative === 'siblings') t.ok(engine.stats.acceptedTokens > 0, 'guesses were right')
    }
  )
}

t.test('the next update waits for requests on old weights, and after their time they go on with the new', async t => {
  const models = writeModels(t)
  const fresh = await freshResults(models, {})
  const engine = await engineOf(t, models.whole('aa'), {
    weightVersion: 'aa',
    shadowWeights: true,
    oldWeightsTimeoutMs: 400
  })
  const hurry = slowSteps(t, 4, 20)
  const running = rollout(engine, requestOf(4, 120))
  await until(() => engine.stats.running === 1)
  await update(engine, models.root, models.whole('bb'), 'bb', 'finish_old')
  t.match(engine.weightSets, { live: 1, oldRequests: 1, shadow: { state: 'old' } })
  const { secondsLeft } = engine.weightSets!.shadow
  t.ok(secondsLeft! > 0 && secondsLeft! <= 0.4, `${secondsLeft!} s left`)
  const next = await rollout(engine, requestOf(1))
  t.strictSame(visible(next), visible(fresh.get('bb')!.rollouts[1]!), 'beside the old request')
  await update(engine, models.root, models.whole('aa'), 'third')
  t.match(engine.weightSets, { live: 0, oldRequests: 0, shadow: { state: 'idle', secondsLeft: null } })
  hurry()
  const got = await running
  t.equal(got.versions[0], 'aa')
  t.equal(got.versions.at(-1), 'third', 'it went on with the weights in use')
})

t.test('an update waits for old requests within its deadline, not for paused ones, and not past a close', async t => {
  const models = writeModels(t)
  const engine = await engineOf(t, models.whole('aa'), { weightVersion: 'aa', shadowWeights: true })
  slowSteps(t, 4, 20)
  const running = rollout(engine, requestOf(4, 2000))
  await until(() => engine.stats.running === 1)
  await update(engine, models.root, models.whole('bb'), 'bb', 'finish_old')
  const before = await engine.checksums()
  const source = await openDiskSource(models.whole('ab'), { roots: [models.root] })
  const late = await engine.update({ deadlineMs: 200 })
  await t.rejects(late.write(source), { code: 'DEADLINE', message: /finish_old.*Nothing has changed/ })
  await late.abort('late')
  await source.close()
  t.match(engine.weightSets, { oldRequests: 1, shadow: { state: 'old' } })
  const label = await engine.update({ onRunning: 'finish_old' })
  const { secondsLeft } = engine.weightSets!.shadow
  await label.commit({ version: 'label', flushCache: true })
  t.ok(engine.weightSets!.shadow.secondsLeft! <= secondsLeft!, 'a label alone starts no time anew')
  t.equal(engine.stats.cachedTokens, 0, 'and flushes the cache')
  t.same(await engine.checksums(), before)

  await engine.pause('in_place')
  await update(engine, models.root, models.whole('ab'), 'ab', 'finish_old')
  t.match(engine.weightSets, { oldRequests: 1, shadow: { state: 'old' } }, 'it finishes on bb now')
  await engine.resume()
  const waiting = update(engine, models.root, models.whole('aa'), 'last')
  const ended = running.catch((error: unknown) => error)
  await new Promise(resolve => setTimeout(resolve, 100))
  const began = performance.now()
  await Promise.all([engine.close(), waiting.catch(() => {})])
  t.ok(performance.now() - began < 30_000, 'the close does not wait for 60 s')
  await ended
})

t.test('sleep sends requests on from old weights at once', async t => {
  const models = writeModels(t)
  const engine = await engineOf(t, models.whole('aa'), { weightVersion: 'aa', shadowWeights: true })
  const hurry = slowSteps(t, 4, 20)
  const running = rollout(engine, requestOf(4, 60))
  await until(() => engine.stats.running === 1)
  await update(engine, models.root, models.whole('bb'), 'bb', 'finish_old')
  await engine.pause('retract')
  t.equal(engine.weightSets!.shadow.state, 'old')
  await engine.releaseMemory(['weights'])
  t.match(engine.weightSets, { oldRequests: 0, shadow: { state: 'absent' } })
  await engine.resumeMemory()
  await update(engine, models.root, models.whole('ab'), 'ab')
  hurry()
  await engine.resume()
  const got = await running
  t.same([...new Set(got.versions)], ['aa', 'ab'])
})

t.test('over HTTP: updates and transactions keep old requests; contradictions are refused', async t => {
  const { post, get, ok, bucket, folder, engine } = await serve(t, { shadowWeights: true })
  const hurry = slowSteps(t, 3, 20)
  const start = async (rid: string) =>
    await post('/generate', { input_ids: [49, 43, 49, 61], rid, sampling_params: ENDLESS })
  const before = await engine.checksums()
  const body = { model_path: join(folder, 'trained'), on_running: 'finish_old' }
  for (const more of [{ swap: 'in_place' }, { abort_all_requests: true }]) {
    t.match(await post('/update_weights_from_disk', { ...body, ...more }), {
      status: 400,
      body: { error: { message: /leave one of the two out. Nothing has changed/ } }
    })
  }
  t.match(await post('/update_weights_from_disk', { ...body, on_running: 'stop' }), { status: 400 })
  t.same(await engine.checksums(), before)

  const first = start('first')
  await until(() => engine.stats.running === 1)
  await ok('/update_weights_from_disk', { ...body, weight_version: 'v1' })
  t.match((await get('/server_info')).body.weight_sets, { old_requests: 1, shadow: { state: 'old' } })
  const { body: metrics } = await get('/metrics')
  t.match(metrics, /requests_on_old_weights.* 1\n/)
  t.match(metrics, /weight_shadow_state.*state="old".* 1\n/)
  t.match(await ok('/generate', { input_ids: [49], sampling_params: { max_new_tokens: 2 } }), {
    meta_info: { weight_version: 'v1' }
  })
  await ok('/abort_request', { rid: 'first' })
  t.match((await first).body.meta_info, { weight_version: 'default', finish_reason: { type: 'abort' } })
  await until(() => engine.weightSets!.shadow.state === 'idle')

  const second = start('second')
  await until(() => engine.stats.running === 1)
  const opened = { owner: 'trainer', expected: 'all', weight_version: 'v2', on_running: 'finish_old' }
  const { id } = await ok('/weight_transactions', opened)
  const refused = await bucket('base', 0, { transaction: id, on_running: 'continue' })
  t.match(refused, { status: 409, body: { error: { message: /opened with on_running "finish_old"/ } } })
  for (let index = 0; index < 3; index++) t.equal((await bucket('base', index, { transaction: id })).status, 200)
  await ok(`/weight_transactions/${String(id)}/commit`, {})
  t.match(engine.weightSets, { oldRequests: 1, shadow: { state: 'old' } })
  hurry()
  await ok('/abort_request', { rid: 'second' })
  t.match((await second).body.meta_info, { weight_version: 'v1' })
})

t.test('a server with one set refuses finish_old before the first byte', async t => {
  const { post, folder, engine } = await serve(t)
  const before = await engine.checksums()
  const body = { model_path: join(folder, 'trained'), on_running: 'finish_old' }
  t.match(await post('/update_weights_from_disk', body), {
    status: 409,
    body: { error: { code: 'CONFLICT', message: /one set of weights.*--shadow-weights/ } }
  })
  t.match(await post('/weight_transactions', { owner: 'trainer', on_running: 'finish_old' }), { status: 409 })
  t.same(await engine.checksums(), before)
})
