import multipart from '@fastify/multipart'
import Fastify from 'fastify'
import type { FastifyInstance } from 'fastify'
import t from 'tap'
import type { Test } from 'tap'
import refit from '../src/app/plugin.ts'
import { ByteTokenizer } from './helpers/byte-tokenizer.ts'
import { FakeEngine } from './helpers/fake-engine.ts'
import { call, routeApp } from './helpers/route-app.ts'

/** A host with parsers, validation, serialization, hooks and an error handler of its own. */
async function host (t: Test): Promise<{ app: FastifyInstance, engine: FakeEngine, url: string, seen: string[] }> {
  const seen: string[] = []
  const engine = new FakeEngine()
  const app = Fastify({ forceCloseConnections: true, bodyLimit: 200 })
  await app.register(multipart, { attachFieldsToBody: true })
  app.addContentTypeParser(
    'application/octet-stream',
    { parseAs: 'buffer' },
    async (_request: unknown, body: Buffer) => ({ bytes: body.length })
  )
  app.removeContentTypeParser('application/json')
  app.addContentTypeParser(
    'application/json',
    { parseAs: 'string' },
    async (_request: unknown, body: string) => ({ host: JSON.parse(body) })
  )
  app.setErrorHandler(async (error: Error, _request, reply) => await reply.code(418).send({ host: error.message }))
  app.setNotFoundHandler(async (_request, reply) => await reply.code(404).send({ host: 'nothing' }))
  app.setReplySerializer(payload => JSON.stringify({ wrapped: payload }))
  app.addHook('onRequest', async (request, reply) => {
    seen.push(request.url)
    reply.header('x-host', 'yes')
  })
  app.post('/echo', {
    schema: {
      body: {
        type: 'object',
        properties: { host: { type: 'object', properties: { n: { type: 'integer' } }, additionalProperties: false } }
      }
    }
  }, async request => request.body)
  app.post('/bytes', async request => request.body)
  app.post('/form', async request => ({ fields: Object.keys(request.body as object) }))
  app.get('/fail', async () => {
    throw new Error('own')
  })
  await app.register(refit, { engine, tokenizer: new ByteTokenizer(), prefix: '/rollout' })
  t.teardown(async () => await app.close())
  return { app, engine, url: await app.listen({ port: 0 }), seen }
}

t.test('in a host with its own parsers, refit and the host each use their own', async t => {
  const { url, seen } = await host(t)
  const output = await call(`${url}/rollout/generate`, {
    input_ids: [5],
    sampling_params: { max_new_tokens: '2' },
    unknown: true
  })
  t.equal(output.status, 200)
  t.same(output.json.output_ids, [5, 5])
  t.equal(output.headers.get('x-host'), 'yes', "hooks of the host see refit's requests")
  t.same(seen, ['/rollout/generate'])
  t.equal((await call(`${url}/rollout/pause_generation`, undefined, { method: 'POST' })).status, 200)
  t.equal(
    (await call(`${url}/rollout/continue_generation`, undefined, {
      method: 'POST',
      headers: { 'content-type': 'application/json' }
    }))
      .status,
    200
  )

  t.same(
    (await call(`${url}/echo`, { n: '3', x: 1 })).json,
    { wrapped: { host: { n: 3 } } },
    "the host's own coercion and removal"
  )
  t.same(
    (await call(`${url}/bytes`, undefined, {
      method: 'POST',
      body: Buffer.alloc(7),
      headers: { 'content-type': 'application/octet-stream' }
    }))
      .json,
    { wrapped: { bytes: 7 } }
  )
  const form = new FormData()
  form.set('a', '1')
  t.same((await call(`${url}/form`, undefined, { method: 'POST', body: form })).json, { wrapped: { fields: ['a'] } })
  t.same(await call(`${url}/fail`).then(({ status, json }) => [status, json]), [418, { wrapped: { host: 'own' } }])
  t.same((await call(`${url}/none`)).json, { host: 'nothing' })
})

t.test("types are checked by refit's rules instead of the host's", async t => {
  const { url } = await host(t)
  for (
    const [body, message] of [
      [{ text: null, input_ids: null }, /^Either text/],
      [{ text: 3 }, /^text: expected a string/],
      [{ input_ids: [5], rid: 7 }, /^rid: expected a string/],
      [{ input_ids: [true] }, /^input_ids\[0\]: expected an integer/]
    ] as const
  ) {
    const reply = await call(`${url}/rollout/generate`, body)
    t.equal(reply.status, 400)
    t.match(reply.json.message, message)
  }
  t.equal(
    (await call(`${url}/rollout/update_weight_version`, { new_version: 7 })).status,
    400,
    'a number is no version'
  )
})

t.test('refit has a body limit of its own', async t => {
  const { url } = await host(t)
  const reply = await call(`${url}/rollout/generate`, {
    input_ids: Array(400).fill(5),
    sampling_params: { max_new_tokens: 1 }
  })
  t.equal(reply.status, 200)
  t.equal((await call(`${url}/echo`, { n: 1, pad: 'x'.repeat(300) })).status, 418)
})

t.test('other content types are refused before they are read', async t => {
  const { url } = await host(t)
  const form = new FormData()
  form.set('a', '1')
  for (
    const init of [{ body: form }, { body: Buffer.alloc(9), headers: { 'content-type': 'application/octet-stream' } }, {
      body: '{}',
      headers: { 'content-type': 'text/plain' }
    }]
  ) {
    const reply = await call(`${url}/rollout/generate`, undefined, { method: 'POST', ...init })
    t.equal(reply.status, 415)
    t.match(reply.json.message, /send JSON/)
  }
})

t.test("streams work under a prefix, with the host's headers", async t => {
  const { url } = await host(t)
  const reply = await call(`${url}/rollout/generate`, {
    input_ids: [5],
    stream: true,
    sampling_params: { max_new_tokens: 2 }
  })
  t.equal(reply.headers.get('x-host'), 'yes')
  t.match(reply.text, /data: \[DONE\]\n\n$/)
})

t.test('two plugins in one app have their own engines', async t => {
  const app = Fastify()
  const engines = [
    new FakeEngine({ info: { servedModelName: 'one' } }),
    new FakeEngine({ info: { servedModelName: 'two' } })
  ]
  for (const [i, engine] of engines.entries()) await app.register(refit, { engine, tokenizer: null, prefix: `/${i}` })
  t.teardown(async () => await app.close())
  t.equal((await app.inject('/0/v1/models')).json().data[0].id, 'one')
  t.equal((await app.inject('/1/v1/models')).json().data[0].id, 'two')
  await app.inject({ method: 'POST', url: '/0/pause_generation' })
  t.equal((await app.inject('/0/health')).json().status, 'paused')
  t.equal((await app.inject('/1/health')).json().status, 'ok')
})

t.test('without an engine the error explains how to pass an engine', async t => {
  const register = async (options: object): Promise<unknown> =>
    await Promise.resolve(Fastify().register(refit, options as never))
  for (
    const [engine, got] of [
      [undefined, /\)$/],
      [5, /; got 5$/],
      [null, /; got null$/],
      ['/models/x', /; got '\/models\/x'$/],
      [{ generate: 1 }, /; got \{ generate: 1 \}$/],
      [Promise.resolve(new FakeEngine()), /; got a promise: await it$/]
    ] as const
  ) {
    await t.rejects(register({ engine }), {
      name: 'TypeError',
      message: /^refit needs an engine: app\.register\(refit, \{ engine/
    })
    await t.rejects(register({ engine }), { message: got })
  }
})

t.test('a string instead of a list is refused when the plugin is registered', async t => {
  const register = async (options: object): Promise<unknown> =>
    await Promise.resolve(Fastify().register(refit, { engine: new FakeEngine(), tokenizer: null, ...options } as never))
  await t.rejects(register({ modelRoots: '/checkpoints' }), {
    name: 'TypeError',
    message: "refit: modelRoots is '/checkpoints'; expected an array of strings"
  })
  await t.rejects(register({ modelRoots: ['/a', 5] }), {
    name: 'TypeError',
    message: "refit: modelRoots is [ '/a', 5 ]; expected an array of strings"
  })
  await t.rejects(register({ modelRoots: null }), {
    name: 'TypeError',
    message: 'refit: modelRoots is null; expected an array of strings'
  })
  await t.rejects(register({ allowMasters: '10.0.0.7' }), { name: 'TypeError', message: /^refit: allowMasters is / })
  await t.rejects(register({ dialects: 'vllm' }), { name: 'TypeError', message: /^refit: dialects is / })
})

t.test('hostile JSON is refused and pollutes no prototype', async t => {
  const { url } = await routeApp(t)
  const send = async (body: string | Buffer, path = '/generate') =>
    await call(url + path, undefined, {
      method: 'POST',
      body: body as never,
      headers: { 'content-type': 'application/json' }
    })
  for (
    const body of [
      '{"__proto__":{"text":"a"}}',
      '{"input_ids":[5],"sampling_params":{"__proto__":{"n":2}}}',
      '{"input_ids":[5],"x":[{"\\u005f_proto__":1}]}'
    ]
  ) {
    const reply = await send(body)
    t.equal(reply.status, 400)
    t.match(reply.json, { message: 'the body has a field "__proto__"', param: '__proto__' })
  }
  t.equal(
    (await send(
      '{"input_ids":[5],"constructor":{"prototype":{"polluted":1}},"hasOwnProperty":1,"toString":null,' +
        '"sampling_params":{"max_new_tokens":1}}'
    ))
      .status,
    200
  )
  t.notOk('polluted' in {})
  t.match(
    (await send('{"input_ids":[5],"sampling_params":{"constructor":1}}')).json.message,
    /sampling_params\.constructor: unknown field/
  )
  const deep = 200_000
  t.equal(
    (await send(
      `{"input_ids":[5],"ignored":${'['.repeat(deep)}${']'.repeat(deep)},"sampling_params":{"max_new_tokens":1}}`
    ))
      .status,
    200
  )
  t.equal((await send(`{"text":${'['.repeat(deep)}${']'.repeat(deep)}}`)).status, 400)
  t.equal((await send(`{"\\u0061":${'{"a":'.repeat(deep)}1${'}'.repeat(deep)}}`)).status, 400)
  const open = `${'['.repeat(deep)}${']'.repeat(deep)}`
  t.match(
    (await send(
      `{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":${open}}}`,
      '/v1/chat/completions'
    ))
      .json
      .error,
    { param: 'chat_template_kwargs', message: /nests deeper than/ }
  )
  t.match((await send(`{"messages":[{"role":"user","content":"a","x":${open}}]}`, '/tokenize')).json, {
    param: 'messages',
    message: /nests deeper than/
  })
  t.equal(
    (await send(`{"model_path":"/none","manifest":${open}}`, '/update_weights_from_disk')).json.error.code,
    'CHECKPOINT_PATH'
  )
  for (const body of ['[]', '"x"', '5', 'true', 'null']) {
    const reply = await send(body)
    t.equal(reply.status, 400)
    t.match(reply.json.message, /^body: expected an object, got /)
  }
  for (const body of ['{', '{"a":1,}', "{'a':1}", '\u0000', '{"input_ids":[5]} x', Buffer.from([0xff, 0xfe])]) {
    t.match((await send(body)).json.message, /^the body is not valid JSON/)
  }
  t.equal((await send('   ')).status, 400, 'an empty body is an empty object, and that has no prompt')
  t.equal((await send(' \n', '/continue_generation')).status, 200)
})

t.test('unknown fields are ignored and logged once per route', async t => {
  const lines: any[] = []
  const app = Fastify({
    logger: {
      level: 'info',
      stream: {
        write: (line: string) => {
          lines.push(JSON.parse(line))
        }
      }
    }
  })
  await app.register(refit, { engine: new FakeEngine(), tokenizer: null })
  t.teardown(async () => await app.close())
  for (let i = 0; i < 3; i++) {
    for (const url of ['/continue_generation', '/abort_request']) {
      await app.inject({ method: 'POST', url, payload: { pp_rank: 1, selector: 'all' } })
    }
  }
  const unknown = lines.filter(line => line.msg === 'unknown field ignored').map(({ route, field }) =>
    `${route} ${field}`
  )
  t.same(unknown.sort(), [
    '/abort_request pp_rank',
    '/abort_request selector',
    '/continue_generation pp_rank',
    '/continue_generation selector'
  ])
})

t.test('a body over the limit of its route is 413', async t => {
  const app = Fastify()
  app.addHook('onRoute', route => {
    route.bodyLimit = 100
  })
  await app.register(refit, { engine: new FakeEngine(), tokenizer: null })
  t.teardown(async () => await app.close())
  const url = await app.listen({ port: 0 })
  const reply = await call(`${url}/abort_request`, { rid: 'x'.repeat(200) })
  t.equal(reply.status, 413)
  t.equal(reply.json.error.code, 'BODY_TOO_LARGE')
})
