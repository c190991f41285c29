import t from 'tap'
import type { Test } from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import { buildModelTable } from '../../src/model/model-table.ts'
import { compilePlan } from '../../src/shards/compile-plan.ts'
import type { ShardPlan } from '../../src/shards/compile-plan.ts'
import { messagesOf } from '../../src/shards/messages.ts'
import { groupShards } from '../../src/sources/shards/group-shards.ts'
import { CoveredNames } from '../../src/weights/covered-names.ts'
import { nativeError } from '../helpers/fake-groups.ts'
import { joined } from '../helpers/joined-group.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

// FakeGroups has two ranks, which are ranks 1 and 2 of the group.

/** One rank of a trainer has the whole model. */
function planOf (chunkBytes: number): ShardPlan {
  const table = buildModelTable(tinyArchitecture('Qwen3ForCausalLM'), 2)
  return compilePlan(table, new CoveredNames(table), {
    world: 1,
    layouts: [{ kind: 'mesh', shape: [1], ranks: [0], placements: [{ kind: 'replicate' }] }],
    tensors: [...table.tensors.values()]
      .filter(({ alternative }) => !alternative)
      .map(({ name, shape }) => ({ name, shape, dtype: 'bfloat16', layout: 0 })),
    chunkBytes,
    allowMissing: false
  })
}

async function world (t: Test, chunkBytes = 1 << 15) {
  const { fake, group } = await joined(t, 'nccl')
  const plan = planOf(chunkBytes)
  const chunks = messagesOf(plan)
  const source = groupShards(plan, group)
  const bytes = chunks.map(({ messages }) => messages.reduce((sum, { bytes }) => sum + bytes, 0))
  return { fake, group, plan, chunks, source, bytes }
}

t.test('a chunk is queued behind the one before, and nothing needs the gate before it is shut', async t => {
  const { fake, group, plan, chunks, source, bytes } = await world(t)
  t.ok(chunks.length > 3)
  t.ok(chunks.every(({ messages }) => messages.some(({ param }) => param >= 0)))
  await source.jobs.ready()
  t.same(fake.log, [])
  t.equal(source.jobs.touched, false)
  const arrived = new Int32Array(plan.counts.length)
  await fake.shut(async () => {
    for (const [chunk, { messages }] of chunks.entries()) {
      fake.log.length = 0
      const coming = source.jobs.next()
      await turn()
      const begins = chunk === 0 ? ['connect', 'stage', 'messages', 'messages'] : ['messages']
      t.same(fake.log, [...chunk + 1 < chunks.length || chunk === 0 ? begins : [], 'receive'], `chunk ${chunk}`)
      t.equal(source.jobs.touched, true, 'parameters change from the first receive on')
      fake.send(messages.length)
      const { job, owners, inPlace } = (await coming)!
      t.match(job.sources, [{ staged: { slot: chunk % 2 } }])
      for (const tensor of [...owners, ...inPlace!.owners]) arrived[tensor]!++
      t.equal(inPlace!.bytes, messages.reduce((sum, { param, bytes }) => sum + (param < 0 ? 0 : bytes), 0))
    }
    t.equal(await source.jobs.next(), undefined)
  })
  t.same(arrived, plan.counts)
  t.equal(group.counts.bytesReceived, bytes.reduce((a, b) => a + b, 0))
  t.same(fake.staged, [[1 << 20, 2]])
  t.same(
    fake.messages[0],
    chunks[0]!.messages.map(({ rank, source, param, at, bytes }) => (
      { mine: rank + 1, other: source, into: param + 1, offset: at, bytes }
    ))
  )
  const { log } = fake
  log.length = 0
  await source.close()
  t.same(log, [])
  t.equal(group.state, 'connected')
})

t.test('a refused update receives and drops all chunks, and changes no parameter', async t => {
  const { fake, group, chunks, source, bytes } = await world(t)
  const closing = source.close()
  for (const { messages } of chunks) {
    await turn()
    fake.send(messages.length)
  }
  await closing
  t.equal(fake.messages.length, chunks.length)
  t.ok(fake.messages.flat().every(({ into, offset }) => into === 0 && offset === 0))
  t.equal(source.jobs.touched, false)
  t.equal(group.counts.bytesDropped, bytes.reduce((a, b) => a + b, 0))
  t.equal(group.failure, null, 'the group stays in step')
  t.match(source.explain!(Object.assign(new Error('x'))), /x/)
  await source.close()
  t.equal(fake.messages.length, chunks.length)
})

t.test('after a write that failed the rest is dropped, those that were queued first', async t => {
  const { fake, group, chunks, source } = await world(t)
  await fake.shut(async () => {
    fake.send(chunks[0]!.messages.length)
    await source.jobs.next()
    const dropping = source.jobs.drop!(false)
    for (const { messages } of chunks.slice(1)) {
      await turn()
      fake.send(messages.length)
    }
    await dropping
  })
  t.equal(fake.messages.length, chunks.length)
  t.ok(fake.messages[1]!.some(({ into }) => into > 0), 'the second was queued for its parameters')
  t.ok(fake.messages.slice(2).flat().every(({ into }) => into === 0))
  t.equal(group.failure, null)
  await source.close()
})

t.test('a rank that sends nothing ends the update and the group, and is named', async t => {
  const { fake, group, chunks, source } = await world(t)
  const failing = fake.shut(async () => {
    const coming = source.jobs.next()
    await turn()
    fake.fault = nativeError('GROUP_TIMEOUT', 'receiving 3 messages of rank 0: not done after 4 s')
    fake.send(1)
    await coming
  })
  await t.rejects(failing, {
    code: 'GROUP_TIMEOUT',
    message: new RegExp(`chunk 1 of ${chunks.length} of the shards.*messages of rank 0`)
  })
  await source.close()
  t.equal(group.state, 'failed')
  t.equal(fake.messages.length, 2, 'nothing is received after it')
})

t.test('a refused update lends the gate to an earlier receive beside steps that has to connect', async t => {
  const { fake, group, chunks, source } = await world(t)
  fake.besideSteps = true
  let closing: Promise<void> | undefined
  let earlier: ReturnType<typeof group.receive> | undefined
  await fake.shut(async () => {
    closing = source.close()
    await turn()
    earlier = group.receive({
      piece: { begin: 0, length: 10, parts: Float64Array.of(0, 10), first: 0, end: 1 },
      into: { places: Float64Array.of(7000, 10), set: 1, began: () => {} },
      isBeside: true,
      of: 'a tensor',
      at: 'piece 1 of 1',
      nameOf: () => 'a tensor'
    })
    for (let i = 0; i < 20; i++) await turn()
    // After a timer, those that wait for the gate look for it in the order in which they came.
    await new Promise(resolve => setTimeout(resolve, 1))
    t.same(fake.log, [], 'both wait for the gate, the refused update first')
  })
  for (let i = 0; i < 50; i++) await turn()
  t.same(fake.log.slice(0, 2), ['connect', 'in place'])
  fake.send(1 + chunks.reduce((sum, { messages }) => sum + messages.length, 0))
  await earlier!.arrive()
  await closing
  t.equal(group.failure, null, 'the group stays in step')
  t.equal(fake.messages.length, chunks.length)
  t.equal(source.jobs.touched, false)
})
