import t from 'tap'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { packageRoot } from '../../src/root.ts'
import { eventually } from '../helpers/eventually.ts'
import { slowSteps } from '../helpers/slow-steps.ts'
import { layout, PATH, post, uploadServer } from '../helpers/uploads.ts'
import type { FormParts, Reply, UploadServer } from '../helpers/uploads.ts'

// Replies to uploads in transactions, and their time.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

const BYTES = 'application/octet-stream'

async function json (server: UploadServer, path: string, body: object = {}): Promise<Reply> {
  const reply = await fetch(server.url + path, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(body)
  })
  return { status: reply.status, body: await reply.json() }
}

t.test('an upload for a foreign, ended or unknown transaction is refused before its body has arrived', async t => {
  const server = await uploadServer(t)
  const file = server.file('adder')
  const before = await server.checksums()
  const { body: dead } = await json(server, '/weight_transactions', { owner: 'gone' })
  await json(server, `/weight_transactions/${dead.id}/abort`, { reason: 'tired' })
  const { body: open } = await json(server, '/weight_transactions', { owner: 'me' })
  const head = '--x\r\ncontent-disposition: form-data; name="transaction"\r\n\r\nID\r\n' +
    '--x\r\ncontent-disposition: form-data; name="f"; filename="f"\r\n\r\n'
  const cases: [query: string, form: string | null, status: number, code: string, message: RegExp][] = [
    [
      '',
      null,
      409,
      'TRANSACTION_OPEN',
      /^the weight transaction of me is open, for \d+ s more at most: .*Nothing has changed$/
    ],
    ['?mode=stream', null, 409, 'TRANSACTION_OPEN', /of me is open/],
    [`?transaction=${dead.id}`, null, 409, 'TRANSACTION_ENDED', /of gone was aborted: tired/],
    ['?transaction=nobody', null, 404, 'NOT_FOUND', /no weight transaction "nobody"/],
    ['', head.replace('ID', dead.id), 409, 'TRANSACTION_ENDED', /tired/],
    ['?mode=stream', head.replace('ID', 'nobody'), 404, 'NOT_FOUND', /nobody/],
    [`?transaction=${dead.id}`, '--x\r\n', 409, 'TRANSACTION_ENDED', /tired/]
  ]
  for (const [query, form, status, code, message] of cases) {
    const { request, reply } = post(server.url + PATH + query, {
      'content-type': form === null ? BYTES : 'multipart/form-data; boundary=x',
      'content-length': file.length + 1000
    })
    request.write(
      Buffer.concat([Buffer.from(form ?? ''), form === '--x\r\n' ? Buffer.alloc(0) : file.subarray(0, 100)])
    )
    // The rest is never sent.
    t.match(await reply, { status, body: { success: false, error: { code, message } } }, `${query} ${form ?? ''}`)
    request.destroy()
  }
  t.match(await server.send(file, `?transaction=${open.id}`), { status: 200 })
  const form = await server.form([['file', server.file('adder-base'), 'x'], ['transaction', open.id]])
  t.match(form, { status: 200 }, 'a form may name it behind the file')
  t.match(await json(server, `/weight_transactions/${open.id}/commit`), { status: 200, body: { failed_count: 0 } })
  t.same(await server.checksums(), before)
  await server.idle()
})

t.test('an upload or handle request with invalid fields leaves pending tensors in its scope', async t => {
  const server = await uploadServer(t)
  for (
    const bad of [
      async () => await json(server, PATH, { serialized_named_tensors: 5 }),
      async () => await server.send(server.file('adder'), '?flush_cache=maybe'),
      async () => await server.send(server.file('adder'), '?mode=fast')
    ]
  ) {
    t.equal((await json(server, '/begin_weight_update')).status, 200)
    t.equal((await bad()).status, 400)
    t.match(await json(server, '/end_weight_update'), {
      status: 409,
      body: { error: { code: 'TRANSACTION_INCOMPLETE', message: /refused before its tensors were known/ } }
    })
    t.equal((await server.send(server.file('adder'))).status, 200)
    t.equal((await json(server, '/end_weight_update')).status, 200)
  }
})

t.test('a form that is refused before its tensors are known leaves them pending in its transaction', async t => {
  const server = await uploadServer(t)
  const file = server.file('adder')
  const bad: [string, FormParts][] = [
    ['cut off', [['file', file.subarray(0, -5), 'x']]],
    ['no safetensors', [['file', Buffer.from('not a file of tensors'), 'x']]],
    ['written as it comes', [['mode', 'stream'], ['file', file.subarray(0, 20), 'x']]],
    ['named behind the file', [['file', file, 'x'], ['flush_cache', 'maybe']]]
  ]
  for (const [what, parts] of bad) {
    const { body: open } = await json(server, '/weight_transactions', { owner: 'me', weight_version: what })
    t.equal((await server.form([['transaction', open.id], ...parts])).status, 400, what)
    const commit = await json(server, `/weight_transactions/${open.id}/commit`)
    t.match(commit, {
      status: 409,
      body: { error: { code: 'TRANSACTION_INCOMPLETE', message: /refused before its tensors were known/ } }
    }, what)
    t.equal(server.engine.weightVersion, 'default')
    t.equal((await json(server, `/weight_transactions/${open.id}/abort`)).body.outcome, 'old')
  }
  await server.idle()
})

t.test('an upload without tensors is refused', async t => {
  const server = await uploadServer(t)
  const before = await server.checksums()
  const empty = Buffer.from('\x08\0\0\0\0\0\0\0{}      ', 'latin1')
  const refused = {
    status: 400,
    body: { success: false, error: { code: 'WEIGHTS_INCOMPLETE', message: /the upload contains no tensor/ } }
  }
  t.match(await server.send(empty, '?weight_version=never'), refused)
  t.match(await server.send(empty, '?weight_version=never&mode=stream'), refused)
  t.match(await server.form([['weight_version', 'never'], ['file', empty, 'a'], ['file', empty, 'b']]), refused)
  t.equal(server.engine.weightVersion, 'default')
  t.same(await server.checksums(), before)
  const whole = await server.form([['file', empty, 'a'], ['file', server.file('adder'), 'b']])
  t.match(whole, { status: 200, body: { report: { missing_count: 0 } } }, 'one file of several may be empty')
  await server.idle()
})

t.test('a begin and an end without writes between them do not wait', async t => {
  const server = await uploadServer(t)
  slowSteps(t, 1)
  const running = json(server, '/generate', {
    input_ids: [49, 43, 49, 61],
    rid: 'endless',
    sampling_params: { max_new_tokens: 2000, ignore_eos: true }
  })
  while (server.engine.stats.running === 0) await sleep(1)
  t.match(await json(server, '/begin_weight_update'), { status: 200 })
  t.match(await json(server, '/end_weight_update'), { status: 200, body: { transaction: { outcome: 'old' } } })
  t.equal(server.engine.stats.running, 1, 'the request is still running')
  server.engine.abortAll()
  await running
})

t.test('the path of the loaded weights changes when their transaction ends', async t => {
  const server = await uploadServer(t)
  const path = async (): Promise<string> =>
    (await (await fetch(`${server.url}/get_model_info`)).json() as { model_path: string }).model_path
  const first = await path()
  const adder = join(first, '..', 'adder')
  const { body: one } = await json(server, '/weight_transactions', { owner: 'a' })
  t.match(
    await json(server, '/update_weights_from_disk', {
      model_path: join(adder, 'model.safetensors'),
      transaction: one.id
    }),
    { status: 200 }
  )
  t.equal(await path(), first, 'not before its end')
  const { body: ended } = await json(server, `/weight_transactions/${one.id}/abort`)
  t.match([ended.outcome, await path()], ['new', join(adder, 'model.safetensors')], 'all tensors had arrived')
  const { body: two } = await json(server, '/weight_transactions', { owner: 'a' })
  await json(server, '/update_weights_from_disk', { model_path: adder, transaction: two.id })
  await json(server, `/weight_transactions/${two.id}/commit`)
  t.equal(await path(), adder)
  const { body: three } = await json(server, '/weight_transactions', { owner: 'a', expected: ['model.norm.weight'] })
  t.match(
    await json(server, '/update_weights_from_disk', { model_path: join(first, 'nowhere'), transaction: three.id }),
    { status: 400 }
  )
  await json(server, `/weight_transactions/${three.id}/abort`)
  t.equal(await path(), adder)
})

t.test('with mode=stream a sender that trickles is cut off, and the torn tensors are named', async t => {
  const server = await uploadServer(t, { uploadTimeoutMs: 300, uploadMemoryBytes: 512 << 10 })
  const file = server.file('adder')
  const { dataStart } = layout(file)
  const half = dataStart + 300_000
  const answer = await eventually(async () => {
    const { request, reply } = post(`${server.url}${PATH}?mode=stream`, {
      'content-type': BYTES,
      'content-length': file.length
    })
    request.write(file.subarray(0, half))
    // The sender's pauses are shorter than the deadline, unless the machine halts.
    const trickle = setInterval(() => {
      request.write(file.subarray(half, half + 1))
    }, 30)
    const answer = await reply
    clearInterval(trickle)
    request.destroy()
    return answer
  }, answer => /too slowly/.test(answer?.body.message))
  t.match(answer, {
    status: 500,
    body: {
      error: {
        code: 'WEIGHTS_TORN',
        message: /came too slowly to be written as it comes.*0\.3 s \(--upload-timeout\).*Torn: /
      }
    }
  })
  t.equal(server.engine.weights.state, 'torn')
  t.equal((await server.sendUntilTaken(file)).status, 200)
  t.equal(server.engine.weights.state, 'current')
  await server.idle()
})
