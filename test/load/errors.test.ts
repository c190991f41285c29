import type { ServerResponse } from 'node:http'
import t from 'tap'
import { ServerConnection } from '../../src/client/server-connection.ts'
import { detectServer } from '../../src/load/detect.ts'
import { runLoad } from '../../src/load/run-load.ts'
import { PLAN } from '../helpers/load/plan.ts'
import { END, event, json, scriptedServer, sglangEvent } from '../helpers/load/scripted-server.ts'

const stream = (reply: ServerResponse, ...events: string[]): ServerResponse => {
  reply.writeHead(200)
  for (const text of events) reply.write(text)
  return reply
}

/** Each failure: what the server does, and the kind and the message under which it is counted. */
const FAILURES: [kind: string, message: RegExp, answer: (reply: ServerResponse) => unknown][] = [
  [
    '503 QUEUE_FULL',
    /as many wait/,
    reply => json(reply, 503, { error: { code: 'QUEUE_FULL', message: 'as many wait' } })
  ],
  ['400 BadRequestError', /too long/, reply => json(reply, 400, { type: 'BadRequestError', message: 'too long' })],
  ['502', /^<html>nginx<\/html>$/, reply => reply.writeHead(502).end('<html>nginx</html>')],
  ['stream broke off', /end mark/, reply => stream(reply, sglangEvent(1)).end()],
  ['connection UND_ERR_SOCKET', /other side closed/, reply => {
    stream(reply, sglangEvent(1))
    setTimeout(() => reply.destroy(), 20)
  }],
  ['no JSON', /JSON/, reply => stream(reply, 'data: {oops\n\n').end(END)],
  [
    'in the stream: ENGINE_TORN',
    /torn/,
    reply => stream(reply, event({ error: { refit_code: 'ENGINE_TORN', code: 503, message: 'torn' } })).end(END)
  ],
  [
    'aborted by the server',
    /paused/,
    reply => stream(reply, sglangEvent(1, { finish_reason: { type: 'abort', message: 'paused' } })).end(END)
  ],
  ['no tokens', /1 of 1/, reply => stream(reply).end(END)],
  ['unknown sample', /sample 3 of 1/, reply => stream(reply, sglangEvent(1, {}, 3)).end(END)]
]

for (const [kind, message, answer] of FAILURES) {
  t.test(`a failure is counted by its kind: ${kind}`, async t => {
    const url = await scriptedServer(t, ({ reply }) => answer(reply))
    const connection = new ServerConnection(url, {})
    t.teardown(async () => await connection.close())
    const result = await runLoad({ ...PLAN, connection, requests: 2 })
    t.match(result, { sent: 2, succeeded: 0, outputTokens: 0, errors: [{ kind, count: 2, example: message }] })
  })
}

t.test('a request that never ends is a timeout', async t => {
  const url = await scriptedServer(t, ({ reply }) => stream(reply, sglangEvent(1)))
  const connection = new ServerConnection(url, {})
  t.teardown(async () => await connection.close())
  const { errors } = await runLoad({ ...PLAN, connection, timeoutMs: 100 })
  t.match(errors, [{ kind: 'timeout', count: 1, example: 'not done after 0.1 s' }])
})

t.test('a load that is stopped counts neither successes nor errors for what it cut off', async t => {
  const stop = new AbortController()
  const url = await scriptedServer(t, ({ reply }) => {
    stream(reply, sglangEvent(1))
    stop.abort()
  })
  const connection = new ServerConnection(url, {})
  t.teardown(async () => await connection.close())
  t.match(await runLoad({ ...PLAN, connection, requests: 5, signal: stop.signal }), {
    sent: 0,
    succeeded: 0,
    errors: []
  })
})

t.test('a server is recognised by its routes', async t => {
  const detect = async (routes: Record<string, unknown>, api: 'openai' | null = null) => {
    const url = await scriptedServer(
      t,
      ({ path, reply }) => json(reply, path in routes ? 200 : 404, routes[path] ?? { error: 'none' })
    )
    const connection = new ServerConnection(url, {})
    t.teardown(async () => await connection.close())
    return await detectServer(connection, { url, api, model: null })
  }
  const models = (owner: string): object => ({ data: [{ id: 'big', owned_by: owner }] })
  t.match(
    await detect({
      '/v1/models': models('sglang'),
      '/get_model_info': { model_path: '/m', weight_version: 'default' },
      '/get_server_info': { version: '0.5.23' }
    }),
    { kind: 'sglang', version: '0.5.23', model: 'big', api: 'sglang', weightVersion: 'default', vocabulary: null }
  )
  t.match(await detect({ '/v1/models': models('vllm'), '/version': { version: '0.33.0' } }), {
    kind: 'vllm',
    version: '0.33.0',
    model: 'big',
    api: 'vllm'
  })
  t.match(await detect({ '/v1/models': models('openai') }), { kind: 'openai', api: 'chat', version: null })
  t.match(await detect({ '/v1/models': models('openai') }, 'openai'), { kind: 'openai', api: 'openai' })
  await t.rejects(detect({}), { code: 'ENGINE_FAILED', message: /lists no model .* --model/ })
})
