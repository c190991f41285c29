import t from 'tap'
import { writeFileSync } from 'node:fs'
import { open } from 'node:fs/promises'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import type { TokenEvent } from '../../src/contract/rollout-engine.ts'
import { adapterEngine, PROMPT } from './adapter-engine.ts'
import { rolloutRequest } from '../helpers/rollout.ts'
import { memorySource } from '../helpers/memory-source.ts'
import { peftTensors, tensorSource } from '../helpers/adapters.ts'

// Names, versions and slots of adapters in a running engine.

t.test('every answer amid 200 replacements is that of the version it claims', async t => {
  const { engine, adapter, load, generate } = await adapterEngine(t)
  const variants = [1, 2, 3].map(variant => adapter(variant))
  const expected: string[] = []
  for (const one of variants) {
    await load('policy', one)
    expected.push((await generate('policy')).tokens.join())
  }
  t.equal(new Set(expected).size, 3, 'the variants answer differently')
  const base = (await generate()).tokens.join()
  t.notOk(expected.includes(base))

  const variantOf = new Map<number, number>()
  const control = new AbortController()
  let answers = 0
  const client = async (): Promise<void> => {
    while (!control.signal.aborted) {
      const { tokens, last } = await generate('policy')
      const variant = variantOf.get(last.adapterVersion!)
      // The load's own reply may come after the first answers of its version.
      if (variant === undefined) await sleep(1)
      if (tokens.join() !== expected[variantOf.get(last.adapterVersion!)!]) t.fail(`version ${last.adapterVersion}`)
      answers++
    }
  }
  variantOf.set(engine.adapters!.get('policy')!.version, 2)
  const clients = [1, 2, 3].map(async () => await client())
  for (let i = 0; i < 200; i++) {
    const report = await load('policy', variants[i % 3]!)
    variantOf.set(report.version, i % 3)
    if (i % 10 === 0) await sleep(5)
  }
  control.abort()
  await Promise.all(clients)
  t.ok(answers > 5, `${answers} answers`)
  t.equal((await generate()).tokens.join(), base, 'the base model is as before')
  t.equal(engine.adapters!.slotsUsed, 1, 'old versions have left their slots')
})

t.test('a running request stays on its version, and the next one takes the new version', async t => {
  const { engine, adapter, load, generate } = await adapterEngine(t)
  await load('policy', adapter(1))
  const old = await generate('policy', 200)
  const request = rolloutRequest(PROMPT, { maxNewTokens: 200, temperature: 0, ignoreEos: true })
  const stream = engine.generate({ ...request, adapter: 'policy' })[Symbol.asyncIterator]()
  const events: TokenEvent[] = [(await stream.next()).value as TokenEvent]
  const { version, replaced } = await load('policy', adapter(2))
  t.equal(replaced, events[0]!.adapterVersion)
  const fresh = await generate('policy')
  t.equal(fresh.last.adapterVersion, version)
  for (let next = await stream.next(); next.done !== true; next = await stream.next()) events.push(next.value)
  t.same(events.flatMap(({ tokens }) => tokens), old.tokens)
  t.ok(events.every(({ adapterVersion }) => adapterVersion === replaced))
})

t.test('adapters beyond the slots wait in host memory and come back the same', async t => {
  const { engine, adapter, load, generate } = await adapterEngine(t, { maxCpuLoras: 6 })
  const names = ['a', 'b', 'c', 'd', 'e', 'f']
  const expected = new Map<string, string>()
  for (const [i, name] of names.entries()) {
    await load(name, adapter(i, 1 + 3 * i))
    expected.set(name, (await generate(name)).tokens.join())
  }
  const residents = engine.adapters!.list().filter(({ resident }) => resident)
  t.equal(residents.length, 3, 'two slots and one for the next version')
  for (let turn = 0; turn < 3; turn++) {
    const answers = await Promise.all(names.map(async name => (await generate(name)).tokens.join()))
    t.same(answers, names.map(name => expected.get(name)))
  }
  for (const name of names) await generate(name, 1)
  await load('g', adapter(9))
  t.same(engine.adapters!.list().map(({ name }) => name), ['b', 'c', 'd', 'e', 'f', 'g'], 'the least used one left')
  await t.rejects(generate('a'), { code: 'ADAPTER_UNKNOWN', message: /"a" is loaded; loaded are "b"/ })
})

t.test('unloading finishes, waits for or refuses running requests', async t => {
  const { engine, adapter, load } = await adapterEngine(t)
  const adapters = engine.adapters!
  const long = (name: string) => {
    const request = rolloutRequest(PROMPT, { maxNewTokens: 300, temperature: 0, ignoreEos: true })
    return engine.generate({ ...request, adapter: name })[Symbol.asyncIterator]()
  }
  await load('policy', adapter(1))
  const first = long('policy')
  await first.next()
  await t.rejects(adapters.unload('policy', 'refuse'), { code: 'CONFLICT', message: /1 requests use/ })
  t.equal((await adapters.unload('policy')).requests, 1)
  await t.rejects(adapters.unload('policy'), { code: 'ADAPTER_UNKNOWN' })
  let tokens = 1
  for (let next = await first.next(); next.done !== true; next = await first.next()) tokens += next.value.tokens.length
  t.equal(tokens, 300)
  t.equal(adapters.slotsUsed, 0)

  await load('policy', adapter(1))
  const second = long('policy')
  await second.next()
  let isUnloaded = false
  const unloading = adapters.unload('policy', 'wait').then(() => {
    isUnloaded = true
  })
  await sleep(20)
  t.notOk(isUnloaded)
  await second.return!()
  await unloading
  t.equal(adapters.slotsUsed, 0)
})

t.test('a load, an unload and an abort work while the engine is paused', async t => {
  const { engine, adapter, load, generate } = await adapterEngine(t)
  await load('policy', adapter(1))
  await engine.pause('in_place')
  const held = generate('policy', 4)
  await load('policy', adapter(2))
  await load('other', adapter(3))
  await engine.adapters!.unload('policy')
  await engine.resume()
  t.equal((await held).last.adapterVersion, 1)

  // Three versions with requests take all slots; the fourth waits for one.
  await load('a', adapter(4))
  await load('b', adapter(5))
  await load('c', adapter(6))
  await engine.pause('in_place')
  const waiting = ['a', 'b', 'c'].map(async name => await generate(name, 2))
  const request = rolloutRequest(PROMPT, { maxNewTokens: 2 })
  const stream = engine.generate({ ...request, adapter: 'other' })[Symbol.asyncIterator]()
  const event = stream.next()
  await sleep(30)
  t.ok(engine.abort(request.rid))
  t.match((await event).value, { tokens: [], finish: { type: 'abort' } })
  await engine.resume()
  await Promise.all(waiting)
  t.same(engine.adapters!.list().map(({ requests }) => requests), [0, 0, 0, 0])
})

t.test('adapters survive updates of the base, a sleep and a scramble', async t => {
  const { engine, adapter, load, generate, arch } = await adapterEngine(t)
  const { digest } = await load('policy', adapter(1))
  const before = await generate('policy')
  const update = async (variant: number): Promise<void> => {
    const { buildModelTable } = await import('../../src/model/model-table.ts')
    const table = buildModelTable(arch, 1)
    const names = [...table.tensors.values()].filter(({ alternative }) => !alternative).map(({ name }) => name)
    const weights = await engine.update()
    await weights.write(memorySource(table, names, variant))
    await weights.commit({})
  }
  const whole = await engine.checksums()
  await engine.scrambleWeights()
  await update(1)
  t.not((await generate('policy')).logprobs.join(), before.logprobs.join(), 'another base')
  t.notSame(await engine.checksums(), whole)
  const changed = await generate('policy')
  for (const keepWeights of [true, false]) {
    await engine.releaseMemory(undefined, { keepWeights })
    await t.rejects(load('policy', adapter(2)), { code: 'CONFLICT' })
    await engine.resumeMemory()
    if (!keepWeights) await update(1)
    const after = await generate('policy')
    t.same(after.logprobs, changed.logprobs, `after a sleep, weights ${keepWeights ? '' : 'not '}kept`)
  }
  t.equal((await load('again', adapter(1))).digest, digest, 'equal adapters have equal digests')
  t.not((await load('again', adapter(2))).digest, digest)
})

t.test('a load that fails at any tensor leaves the old version and its answers', async t => {
  const folder = t.testdir()
  const { engine, adapter, load, generate } = await adapterEngine(t)
  const first = await load('policy', adapter(1))
  const before = await generate('policy')
  const tensors = peftTensors(adapter(2))
  for (let at = 0; at < tensors.length; at++) {
    const source = tensorSource(tensors)
    const path = join(folder, `short-${at}`)
    const { buffer } = source.sources[0] as { buffer: Buffer }
    writeFileSync(path, buffer.subarray(0, source.tensors[at]!.offset + 3))
    const file = await open(path)
    const short = { ...source, sources: [{ fd: file.fd }] }
    await t.rejects(engine.adapters!.load('policy', adapter(2).config, short), {
      code: 'CHECKPOINT_FORMAT',
      message: `reading failed at tensor "${tensors[at]!.name}"`
    })
    await file.close()
  }
  let looks = 0
  const changing = {
    ...tensorSource(tensors),
    verify: async () => {
      if (++looks > 1) throw new Error('changed')
    }
  }
  await t.rejects(engine.adapters!.load('policy', adapter(2).config, changing), { message: 'changed' })
  t.match(engine.adapters!.get('policy'), { version: first.version, digest: first.digest })
  t.same((await generate('policy')).tokens, before.tokens)
  t.equal(engine.adapters!.slotsUsed, 1)
  // A smaller rank after a larger one finds no rest of it.
  await load('policy', adapter(3, 16))
  const small = adapter(2, 2)
  await load('policy', small)
  const answer = await generate('policy')
  await load('other', small)
  t.same((await generate('other')).logprobs, answer.logprobs)
})

t.test('pins and limits are held, and an adapter that changes nothing is reported', async t => {
  const { engine, adapter, load, generate, arch } = await adapterEngine(t)
  await load('pinned', adapter(1), { pinned: true })
  await t.rejects(load('second', adapter(2), { pinned: true }), { code: 'ADAPTERS_FULL', message: /pinned in 2 slots/ })
  await load('pinned', adapter(2), { pinned: true })
  for (const name of ['a', 'b', 'c']) await load(name, adapter(3))
  t.ok(engine.adapters!.get('pinned')!.resident)
  await t.rejects(load('a', adapter(1), { existing: 'refuse' }), { code: 'CONFLICT', message: /loaded already/ })
  await t.rejects(load('', adapter(1)), { code: 'INVALID_REQUEST' })
  await t.rejects(load('a\nb', adapter(1)), { code: 'INVALID_REQUEST' })
  const { testAdapter } = await import('../helpers/adapters.ts')
  const report = await load('new', testAdapter(arch, { rank: 4, variant: 1, targets: ['q_proj'], zeroB: true }))
  t.ok(report.isZero)
  t.same((await generate('new')).logprobs, (await generate()).logprobs)
  const partial = testAdapter(arch, { rank: 4, variant: 1, targets: ['q_proj'], only: name => name.includes('.0.') })
  t.match(await load('partial', partial), { missing: ['model.layers.1.self_attn.q_proj'], missingCount: 1 })
})
