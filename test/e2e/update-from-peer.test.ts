import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import t from 'tap'
import { joinRegex } from '../helpers/join-regex.ts'
import type { Test } from 'tap'
import { modelFolder, answers, joined, serve, until } from '../helpers/load-from.ts'
import type { Member, Reply } from '../helpers/load-from.ts'

// Serving engines that load their weights from another engine: POST /update_weights_from_peer.

const PATH = '/update_weights_from_peer'

/** Closes the request when `gone` is aborted. */
async function take ({ url }: Member, body: object, gone: AbortSignal): Promise<unknown> {
  return await fetch(url + PATH, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(body),
    signal: gone
  })
    .then(async reply => await reply.json(), () => 'closed')
}

/** Resolves when the engine requests the first byte. */
async function asked ({ engine }: Member): Promise<void> {
  const { addon } = engine.held!.store
  const take = addon.groupParams.bind(addon)
  await new Promise<void>(resolve => {
    addon.groupParams = async (...rest) => {
      resolve()
      await take(...rest)
    }
  })
}

/** The engine sends nothing until the returned function is called. */
function stall ({ engine }: Member): () => void {
  const { addon } = engine.held!.store
  const send = addon.groupParams.bind(addon)
  let goOn = (): void => {}
  const released = new Promise<void>(resolve => {
    goOn = resolve
  })
  addon.groupParams = async (...rest) => {
    await released
    await send(...rest)
  }
  return goOn
}

/** A proxy of the peer that reports wrong checksums. */
async function liar (t: Test, url: string): Promise<string> {
  const server = createServer((request, response) => {
    const chunks: Buffer[] = []
    request.on('data', chunk => chunks.push(chunk))
    request.on('end', () => {
      void fetch(url + request.url!, {
        method: request.method!,
        headers: { 'content-type': 'application/json' },
        ...request.method === 'POST' ? { body: Buffer.concat(chunks) } : {}
      })
        .then(async reply => {
          const body = await reply.json() as { checksums?: Record<string, string> }
          if (body.checksums !== undefined) body.checksums['model.norm.weight'] = '0'.repeat(16)
          response.writeHead(reply.status, { 'content-type': 'application/json' }).end(JSON.stringify(body))
        })
    })
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  t.teardown(() => {
    server.closeAllConnections()
    server.close()
  })
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`
}

for (const [from, to] of [[1, 1], [2, 1], [1, 2]] as const) {
  t.test(
    `an engine with tp ${to} loads from one with tp ${from} while it generates: every ` +
      "answer has its weights' label",
    async t => {
      const peer = await serve(t, 'adder', { tp: from, weightVersion: 'step-9' })
      const one = await serve(t, 'adder-base', { tp: to, weightVersion: 'step-1' })
      const expected: Record<string, string[]> = { 'step-1': await answers(one), 'step-9': await answers(peer) }
      t.notSame(expected['step-1'], expected['step-9'])
      const seen = new Set<string>()
      const over = new AbortController()
      const clients = Promise.all([0, 1, 2].map(async () => {
        while (!over.signal.aborted) {
          const { status, body } = await one.post('/generate', {
            text: '12+30=',
            sampling_params: { temperature: 0, max_new_tokens: 8 }
          })
          const { weight_version: version } = body.meta_info
          if (status !== 200 || body.text !== expected[version]![0]) t.fail(`${status} ${JSON.stringify(body)}`)
          seen.add(version)
        }
      }))
      await until(() => seen.size === 1)
      const reply = await one.post(PATH, { url: peer.url })
      t.match(reply, {
        status: 200,
        body: {
          success: true,
          weight_version: 'step-9',
          backend: 'gloo',
          layout: from === to ? 'parameters' : 'checkpoint',
          message: /Weight version updated to step-9/,
          report: { missing_count: 0 }
        }
      })
      await until(() => seen.size === 2)
      over.abort()
      await clients
      t.same(await one.sums(), await peer.sums())
      t.equal(one.engine.weightVersion, 'step-9')
      t.same(await answers(one), expected['step-9'])
    }
  )
}

t.test(
  'a load that is aborted before the first byte changes nothing; later all is torn ' +
    'until an update writes it',
  async t => {
    const peer = await serve(t, 'adder', { weightVersion: 'step-2' })
    const one = await serve(t, 'adder-base')
    const before = await one.sums()
    const opened = await peer.post('/weight_transactions', { owner: 'somebody' })
    const early = new AbortController()
    const waiting = take(one, { url: peer.url }, early.signal)
    t.match(
      await one.post(PATH, { url: peer.url }),
      { status: 409, body: { message: /already loading weights from / } },
      'one at a time'
    )
    early.abort()
    t.equal(await waiting, 'closed')
    await peer.post(`/weight_transactions/${opened.body.id}/abort`)
    await until(async () => (await one.post(PATH, { url: 'http://127.0.0.1:1' })).status !== 409)
    t.same(await one.sums(), before)
    t.equal(one.engine.weights.state, 'current')

    // The transfer does not start at the peer: this engine has requested the bytes, and waits for them.
    const held = await peer.engine.update()
    const later = new AbortController()
    const there = joined(one)
    const asking = take(one, { url: peer.url }, later.signal)
    await there
    later.abort()
    t.equal(await asking, 'closed')
    await held.abort('the test is over')
    await until(async () => (await one.post(PATH, { url: 'http://127.0.0.1:1' })).status !== 409)
    t.same(await one.sums(), before)
    t.equal(one.engine.weights.state, 'current')

    // The peer has begun, and stalls.
    const goOn = stall(peer)
    const late = new AbortController()
    const begun = asked(one)
    const broken = take(one, { url: peer.url }, late.signal)
    await begun
    let updated: Reply | undefined
    const update = one
      .post('/update_weights_from_disk', { model_path: modelFolder('adder'), weight_version: 'healed' })
      .then(reply => {
        updated = reply
      })
    t.equal(updated, undefined, 'updates wait for it')
    late.abort()
    t.equal(await broken, 'closed')
    await until(() => one.engine.weights.state === 'torn' || updated !== undefined)
    await update
    t.match(updated, { status: 200 })
    t.match(one.engine, { weights: { state: 'current' }, weightVersion: 'healed' })
    t.same(await one.sums(), await peer.sums())
    goOn()
    t.match(await one.post(PATH, { url: peer.url }), { status: 200 }, 'and the peer sends again')
  }
)

for (const tp of [1, 2]) {
  t.test(`tensors whose bytes differ from the sent ones are torn, and get no label (tp ${tp})`, async t => {
    const peer = await serve(t, 'adder', { weightVersion: 'step-3' })
    const one = await serve(t, 'adder-base', { tp })
    const reply = await one.post(PATH, { url: await liar(t, peer.url) })
    t.equal(reply.status, 400)
    t.match(reply.body, {
      success: false,
      error: {
        code: 'WEIGHTS_MISMATCH',
        message: joinRegex(
          /^Failed to update weights: the received weights differ from the sent ones: checksums/,
          / differ \(model.norm.weight\)/
        )
      }
    })
    t.match(one.engine, { weights: { state: 'torn' }, weightVersion: 'default' })
    t.match(await one.post('/generate', { text: '1+1=' }), { status: 503 })
    t.match(await one.post(PATH, { url: peer.url }), { status: 200 })
    t.match(one.engine, { weights: { state: 'current' }, weightVersion: 'step-3' })
  })
}

t.test(
  "addresses follow the rules of trainers' stores, the peer's key is required, and a " +
    'refusal changes nothing',
  async t => {
    const peer = await serve(t, 'adder', {}, { adminApiKey: 'secret' })
    const one = await serve(t, 'adder-base')
    const before = await one.sums()
    for (
      const [body, status, code, message] of [
        [{}, 400, 'INVALID_REQUEST', /url/],
        [{ url: 'nonsense' }, 400, 'CONFIG', /url: expected the URL of a refit server/],
        [{ url: 'unix:/tmp/x.sock' }, 400, 'CONFIG', /url: expected the URL/],
        [{ url: 'http://u:p@127.0.0.1:1' }, 400, 'CONFIG', /keys do not belong in the URL; use api_key/],
        [
          { url: 'http://169.254.169.254/latest' },
          403,
          'MASTER_REFUSED',
          /url "169.254.169.254" is refused: link-local/
        ],
        [{ url: 'http://8.8.8.8:30000' }, 403, 'MASTER_REFUSED', /url "8.8.8.8" is refused/],
        [{ url: peer.url }, 400, 'CONFIG', /refuses: Unauthorized; api_key must be its admin key/],
        [{ url: peer.url, api_key: 'guess' }, 400, 'CONFIG', /refuses/],
        [{ url: 'http://127.0.0.1:1' }, 502, 'ENGINE_FAILED', /no refit server answers at http:\/\/127.0.0.1:1/]
      ] as const
    ) {
      const reply = await one.post(PATH, body)
      t.match(reply, { status, body: { error: { code, message } } }, JSON.stringify(body))
    }
    t.match(await one.post('/begin_weight_update', {}), { status: 200 })
    t.match(await one.post(PATH, { url: peer.url, api_key: 'secret' }), {
      status: 409,
      body: { error: { code: 'TRANSACTION_OPEN' } }
    })
    t.match(await one.post('/end_weight_update', {}), { status: 200 })
    t.same(await one.sums(), before)
    t.match(await one.post(PATH, { url: peer.url, api_key: 'secret' }), { status: 200 })
    t.same(
      await one.sums(),
      Object.fromEntries((await peer.engine.checksums()).tensors.map(({ name, checksum }) => [name, checksum]))
    )
  }
)
