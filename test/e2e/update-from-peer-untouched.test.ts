import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { setTimeout as sleep } from 'node:timers/promises'
import t from 'tap'
import type { Test } from 'tap'
import { answers, joinByHand, joined, serve } from '../helpers/load-from.ts'
import type { Member } from '../helpers/load-from.ts'

// Failed loads of a serving engine from a peer. A load that fails before its first byte changes nothing. A later
// failure leaves all weights torn. No call waits longer than its timeout.

const PATH = '/update_weights_from_peer'

async function pair (): Promise<[peer: Member, one: Member]> {
  return [
    await serve(t, 'adder', { weightVersion: 'step-9' }),
    await serve(t, 'adder-base', { weightVersion: 'step-1' })
  ]
}

async function isUnchanged (t: Test, { engine, sums }: Member, before: unknown): Promise<void> {
  t.equal(engine.weights.state, 'current')
  t.same(await sums(), before)
}

/** The reply to a load that fails because of `happens`, which runs at the peer while the load waits. */
async function refusedLate (
  t: Test,
  happens: (peer: Member) => Promise<unknown>
): Promise<{ status: number, body: any }> {
  const [peer, one] = await pair()
  const before = await one.sums()
  const held = await one.engine.update()
  const there = joined(one)
  const filled = one.post(PATH, { url: peer.url, timeout: 4 })
  await there
  await happens(peer)
  await held.abort('let it go')
  const reply = await filled
  await isUnchanged(t, one, before)
  t.match(await one.post('/generate', { text: '1+1=', sampling_params: { max_new_tokens: 2 } }), { status: 200 })
  return reply
}

t.test('a load fails without a change if the peer begins a transaction before its first byte', async t => {
  t.match(
    await refusedLate(t, async peer => {
      t.match(await peer.post('/weight_transactions', { owner: 'trainer' }), { status: 200 })
    }),
    { status: 504, body: { message: /a weight transaction is open/ } }
  )
})

t.test('a load fails without a change if the peer ends before its first byte', async t => {
  t.not(
    (await refusedLate(t, async peer => {
      await peer.close()
    }))
      .status,
    200
  )
})

t.test('over gloo an engine generates while the peer has not begun', async t => {
  const [peer, one] = await pair()
  const before = await one.sums()
  const held = await peer.engine.update()
  const wait = { isOver: false }
  const filled = one.post(PATH, { url: peer.url, timeout: 3 }).finally(() => {
    wait.isOver = true
  })
  let answered = 0
  for (; !wait.isOver && answered < 4; answered++) await answers(one)
  t.ok(answered > 2, `${answered} calls`)
  t.match(await filled, { status: 504, body: { message: /another weight update was still under way/ } })
  await isUnchanged(t, one, before)
  await held.abort('over')
})

t.test('engines that load from each other keep generating and keep their weights', async t => {
  const members = await pair()
  const [peer, one] = members
  const before = [await peer.sums(), await one.sums()]
  const helds = [await peer.engine.update(), await one.engine.update()]
  const both = [one.post(PATH, { url: peer.url, timeout: 2 }), peer.post(PATH, { url: one.url, timeout: 2 })]
  await sleep(300)
  for (const held of helds) await held.abort('let it go')
  for (const member of members) t.equal((await answers(member)).length, 4)
  for (const { status, body } of await Promise.all(both)) {
    t.ok(
      status === 200 || (status === 504 && /it is loading weights itself/.test(body.message)),
      `${status} ${body.message}`
    )
  }
  for (const { engine } of members) t.equal(engine.weights.state, 'current')
  const after = [await peer.sums(), await one.sums()]
  t.ok(
    after.every(sums => before.some(old => JSON.stringify(old) === JSON.stringify(sums))),
    'of one or of the other, whole'
  )
})

t.test('an engine does not load from itself', async t => {
  const one = await serve(t, 'adder-base')
  t.match(await one.post(PATH, { url: one.url }), { status: 400, body: { message: /is this engine itself/ } })
})

t.test('refusals of the engine are reported at once', async t => {
  const [peer, one] = await pair()
  await one.post('/release_memory_occupation', { tags: ['weights'] })
  t.match(await one.post(PATH, { url: peer.url, timeout: 30 }), {
    status: 409,
    body: { message: /weights cannot be updated while their memory is released/ }
  })
})

t.test('all tensors of a transfer that broke off are torn', async t => {
  const [peer, one] = await pair()
  const hand = await joinByHand(peer, one.engine)
  const { addon } = one.engine.held!.store
  const receive = addon.groupReceive.bind(addon)
  let pieces = 0
  addon.groupReceive = async (...rest) => {
    if (++pieces === 8) hand.links[0]!.abort('the sender has gone')
    await receive(...rest)
  }
  const sent = hand.send()
  await t.rejects(hand.receive())
  await Promise.race([sent, sleep(3000)])
  await hand.close()
  const { weights } = one.engine
  t.equal(weights.state === 'torn' ? weights.tensors.length : 0, Object.keys((await peer.sums()) as object).length)
})

t.test('a load ends at the timeout if the peer never reports what it sent', async t => {
  const [peer, one] = await pair()
  const server = createServer((request, response) => {
    const chunks: Buffer[] = []
    request.on('data', chunk => chunks.push(chunk))
    request.on('end', () => {
      void fetch(peer.url + request.url!, {
        method: request.method!,
        headers: { 'content-type': 'application/json' },
        ...request.method === 'POST' ? { body: Buffer.concat(chunks) } : {}
      })
        .then(async reply => {
          const text = await reply.text()
          if (!request.url!.startsWith('/send_weights')) {
            response
              .writeHead(reply.status, { 'content-type': 'application/json' })
              .end(text)
          }
        })
    })
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  t.teardown(() => {
    server.closeAllConnections()
    server.close()
  })
  const reply = await one.post(PATH, { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, timeout: 1 })
  t.match(reply, {
    status: 504,
    body: { message: /has sent all weights, but not replied with their checksums within 1 s/ }
  })
  t.equal(one.engine.weights.state, 'torn', 'the received bytes were not compared')
})
