import t from 'tap'
import type { Test } from 'tap'
import { useLoop } from '../helpers/nccl-trainer.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { answers, serve, until } from '../helpers/load-from.ts'
import type { Member } from '../helpers/load-from.ts'

// Engines on GPUs that serve and load their weights from another engine over NCCL. CUDA is a stand-in, and
// native/test/nccl_loop.cc stands in for NCCL. Calls that allocate on a GPU or spin on it run only while no step runs,
// on both sides.

const loop = useLoop()

/**
 * Records the calls to the engine's addon: their names, the calls during which steps ran, and the most simultaneous
 * connects.
 */
function watchCalls ({ engine }: Member): { names: Set<string>, stepped: Set<string>, connecting: number } {
  const { addon } = engine.held!.store
  const seen = { names: new Set<string>(), stepped: new Set<string>(), connecting: 0 }
  let connecting = 0
  for (
    const name of [
      'ncclConnect',
      'groupBarrier',
      'stageGroup',
      'groupReceive',
      'groupSend',
      'groupParams',
      'endGroup'
    ] as const
  ) {
    const call = addon[name].bind(addon) as (...args: unknown[]) => Promise<unknown>
    Object.assign(addon, {
      [name]: async (...args: unknown[]) => {
        const { steps } = engine.stats
        seen.names.add(name)
        if (name === 'ncclConnect') seen.connecting = Math.max(seen.connecting, ++connecting)
        try {
          return await call(...args)
        } finally {
          if (name === 'ncclConnect') connecting--
          if (engine.stats.steps !== steps) seen.stepped.add(name)
        }
      }
    })
  }
  return seen
}

async function pair (t: Test, from: number, to: number, shadowWeights = false): Promise<[peer: Member, one: Member]> {
  const peer = await serve(t, 'adder', { device: 'cuda', baseGpuId: 0, tp: from, weightVersion: 'step-9' }, {
    ncclPath: loop
  })
  const one = await serve(
    t,
    'adder-base',
    { device: 'cuda', baseGpuId: from, tp: to, weightVersion: 'step-1', shadowWeights },
    { ncclPath: loop }
  )
  return [peer, one]
}

/** Starts clients that send requests without a pause, until the returned function is called. */
function ask (
  t: Test,
  member: Member,
  expected: Readonly<Record<string, string>>
): { seen: Set<string>, end: () => Promise<void> } {
  const seen = new Set<string>()
  const over = new AbortController()
  const clients = Promise.all([0, 1, 2].map(async () => {
    while (!over.signal.aborted) {
      const { status, body } = await member.post('/generate', {
        text: '12+30=',
        sampling_params: { temperature: 0, max_new_tokens: 8 }
      })
      const version = body.meta_info?.weight_version
      if (status !== 200 || body.text !== expected[version]) t.fail(`${status} ${JSON.stringify(body)}`)
      seen.add(version)
    }
  }))
  return {
    seen,
    end: async () => {
      over.abort()
      await clients
    }
  }
}

for (const [from, to] of [[1, 1], [2, 2], [1, 2], [2, 1]] as const) {
  t.test(
    `over NCCL, from tp ${from} to tp ${to}, while both generate: no step runs while ` +
      'the transfer needs the GPUs',
    async t => {
      const [peer, one] = await pair(t, from, to)
      const expected = { 'step-1': (await answers(one))[0]!, 'step-9': (await answers(peer))[0]! }
      const watched = [watchCalls(peer), watchCalls(one)]
      const clients = [ask(t, peer, expected), ask(t, one, expected)]
      await until(() => clients.every(({ seen }) => seen.size === 1))
      const reply = await one.post('/update_weights_from_peer', { url: peer.url })
      t.match(reply, {
        status: 200,
        body: {
          success: true,
          weight_version: 'step-9',
          backend: 'nccl',
          layout: from === to ? 'parameters' : 'checkpoint',
          report: { missing_count: 0 }
        }
      })
      await until(() => clients[1]!.seen.size === 2)
      for (const { end } of clients) await end()
      for (const { names, stepped, connecting } of watched) {
        t.equal(connecting, from === to ? from : 1, 'all links connect in one stop of the engine')
        t.ok(names.has('ncclConnect') && names.has('endGroup'))
        t.same([...stepped], [])
      }
      t.same(await one.sums(), await peer.sums())
      t.same(await answers(one), await answers(peer))
    }
  )
}

for (const [from, to] of [[1, 1], [2, 2], [1, 2]] as const) {
  t.test(
    `over NCCL, from tp ${from} to tp ${to}, into a second set: the engine stops only to connect and to leave`,
    async t => {
      const [peer, one] = await pair(t, from, to, true)
      const watched = watchCalls(one)
      const hurry = slowSteps(t, 3, 20)
      const running = one.post('/generate', {
        text: '12+30=',
        sampling_params: { max_new_tokens: 1500, ignore_eos: true }
      })
      await until(() => one.engine.stats.running === 1)
      t.match(await one.post('/update_weights_from_peer', { url: peer.url, swap: 'demand' }), {
        status: 200,
        body: { weight_version: 'step-9', backend: 'nccl', report: { ms: { swap: Number } } }
      })
      t.equal(one.engine.stats.running, 1)
      hurry()
      one.engine.abortAll()
      await running
      t.ok(watched.names.has('ncclConnect') && watched.names.has('endGroup'))
      for (const name of ['ncclConnect', 'groupBarrier', 'stageGroup', 'endGroup']) t.notOk(watched.stepped.has(name))
      t.same(await one.sums(), await peer.sums())
      t.same(await answers(one), await answers(peer))
    }
  )
}

for (const [from, to] of [[1, 1], [1, 2]] as const) {
  t.test(
    `over NCCL, from tp ${from} to tp ${to}: the peer generates while this ` +
      "engine's running requests end",
    async t => {
      const [peer, one] = await pair(t, from, to)
      const long = one.post('/generate', {
        text: '12+30=',
        sampling_params: { temperature: 0, max_new_tokens: 1500, ignore_eos: true }
      })
      await until(() => one.engine.stats.running > 0)
      const order: string[] = []
      const { addon } = peer.engine.held!.store
      for (const name of ['groupParams', 'groupSend'] as const) {
        const call = addon[name].bind(addon) as (...args: unknown[]) => Promise<void>
        Object.assign(addon, {
          [name]: async (...args: unknown[]) => {
            order.push('sends')
            await call(...args)
          }
        })
      }
      const filled = one.post('/update_weights_from_peer', { url: peer.url })
      let answered = 0
      const isOver = long.then(({ status, body }) => {
        t.equal(status, 200)
        t.equal(body.meta_info.weight_version, 'step-1', 'of the weights that it began with')
        order.push('ended')
      })
      while (order.length === 0) {
        await answers(peer)
        answered++
      }
      await isOver
      t.match(await filled, { status: 200, body: { weight_version: 'step-9' } })
      t.equal(order[0], 'ended', 'nothing is sent before')
      t.ok(order.includes('sends'))
      t.ok(answered > 2, `${answered} calls were answered meanwhile`)
      t.same(await one.sums(), await peer.sums())
    }
  )
}
