import { readFileSync, statSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { report } from '../../src/cli/report.ts'
import { loadConfig } from '../../src/config/load-config.ts'
import { redact } from '../../src/config/redact.ts'
import { MODEL, serveModel } from '../helpers/conformance/served-model.ts'
import { runCommand } from '../helpers/cli/run-command.ts'
import { json, scriptedServer } from '../helpers/load/scripted-server.ts'

const KEYS = { api: 'the-key-of-clients', admin: 'the-key-of-operators', peer: 'the-key-of-the-peer' }
const PROMPT = '98765+43210='

t.test('wrong arguments are refused', async t => {
  await t.rejects(report(['nowhere']), { code: 'CONFIG', message: /report: expected a URL/ })
  await t.rejects(report(['--outputs', 'x']), { code: 'CONFIG', message: /Unknown option '--outputs'/ })
})

t.test('without a URL it describes this machine', async t => {
  t.intercept(process, 'env', { value: { ...process.env, REFIT_PORT: '1234', REFIT_API_KEY: KEYS.api } })
  const { out, code } = await runCommand(t, report)
  t.equal(code, 0)
  t.match(out, /^refit report, \d{4}-/)
  t.match(out, /^refit: \d+\.\d+\.\d+$/m)
  t.match(out, /^ {2}REFIT_PORT: 1234$/m)
  t.match(out, /^ {2}REFIT_API_KEY: \*\*\*$/m)
  t.notMatch(out, KEYS.api)
})

t.test('a server that cannot be reached is exit code 2, and the rest is written', async t => {
  const { out, err, code } = await runCommand(t, report, 'http://127.0.0.1:9', '--json')
  t.equal(code, 2)
  t.match(err, /cannot be reached/)
  t.match(JSON.parse(out), {
    local: { node: process.version },
    server: { parts: [{ path: '/report', missing: String }] }
  })
})

t.test('no key, token or prompt of a real server is in it', async t => {
  const { config } = loadConfig([
    MODEL,
    '--api-key',
    KEYS.api,
    '--admin-api-key',
    KEYS.admin,
    '--load-from',
    'http://127.0.0.1:9',
    '--load-from-key',
    KEYS.peer,
    '--max-queued-requests',
    '77'
  ], {})
  const { url } = await serveModel(t, { apiKey: KEYS.api, adminApiKey: KEYS.admin, shownConfig: redact(config) })
  const call = async (path: string, body: object, key: string): Promise<{ status: number, text: string }> => {
    const reply = await fetch(url + path, {
      method: 'POST',
      headers: { 'content-type': 'application/json', authorization: `Bearer ${key}` },
      body: JSON.stringify(body)
    })
    return { status: reply.status, text: await reply.text() }
  }
  const greedy = { temperature: 0, max_new_tokens: 12, ignore_eos: true }
  const { text } = await call('/generate', { text: PROMPT, sampling_params: greedy }, KEYS.api)
  const output = (JSON.parse(text) as { text: string }).text
  // Refusals whose messages quote what was sent.
  for (
    const [path, body] of [
      ['/generate', { text: PROMPT, sampling_params: { temperature: PROMPT } }],
      ['/generate', { text: PROMPT, sampling_params: { json_schema: PROMPT } }],
      ['/v1/chat/completions', { messages: [{ role: PROMPT, content: PROMPT }] }],
      ['/v1/completions', { prompt: PROMPT, max_tokens: 1e9 }]
    ] as const
  ) t.ok((await call(path, body, KEYS.api)).status >= 400, path)
  await call('/generate', { text: PROMPT }, 'a-wrong-key-that-was-tried')
  const signed = 'https://me:hunter22@bucket.example/step-1?X-Amz-Signature=abcdef0123456789'
  t.ok((await call('/update_weights_from_disk', { model_path: signed }, KEYS.admin)).status >= 400)

  const file = join(t.testdir(), 'report.json')
  const flags = ['--api-key', KEYS.api, '--admin-api-key', KEYS.admin]
  const { code, out } = await runCommand(t, report, url, ...flags, '--output', file)
  t.strictSame([code, out], [0, ''])
  t.equal(statSync(file).mode & 0o777, 0o600)
  const written = readFileSync(file, 'utf8')
  const parts = Object.fromEntries(
    (JSON.parse(written) as any).server.parts.map(({ path, reply }: any) => [path, reply])
  )
  t.match(parts['/report'], {
    version: String,
    config: { 'max-queued-requests': 77, 'api-key': '***', 'admin-api-key': '***', 'load-from-key': '***' },
    engine: { architecture: 'Qwen3ForCausalLM', device: 'cpu' },
    weights: { state: 'current', version: 'default' }
  })
  const { total, recent } = parts['/report'].errors
  t.equal(total, 6)
  t.match(recent.map(({ route, status }: any) => [route, status]), [
    ['/update_weights_from_disk', 400],
    ['/generate', 401],
    ['/v1/completions', 400],
    ['/v1/chat/completions', 400],
    ['/generate', 400],
    ['/generate', 400]
  ])
  t.ok(recent.every(({ message }: any) => message === null))
  t.match(parts['/metrics'].join('\n'), /^refit:generation_tokens_total\S* 12$/m)

  t.match(parts['/updates'].updates, [{ outcome: 'refused' }])
  t.match(parts['/server_info'], { served_model_name: String })

  const plain = await runCommand(t, report, url, ...flags)
  t.match(plain.out, /^== \/report\n/m)
  t.match(plain.out, /^ {2}max-queued-requests: 77$/m)
  t.ok(output.length >= 8, output)
  for (const secret of [...Object.values(KEYS), PROMPT, output, 'a-wrong-key', 'hunter22', 'abcdef0123456789']) {
    t.notOk(written.includes(secret), `JSON: ${secret}`)
    t.notOk(plain.out.includes(secret), `text: ${secret}`)
  }
})

t.test('the keys of the environment are sent, and a missing one is named', async t => {
  const { url } = await serveModel(t, { apiKey: KEYS.api, adminApiKey: KEYS.admin })
  const missing = async (env: NodeJS.ProcessEnv): Promise<string[]> => {
    const restored = t.intercept(process, 'env', { value: { ...process.env, ...env } })
    const { out } = await runCommand(t, report, url, '--json')
    restored.restore()
    const parts: { missing?: string }[] = JSON.parse(out).server.parts
    return parts.flatMap(({ missing }) => missing ?? []).filter(text => text !== 'not offered')
  }
  t.strictSame(await missing({ REFIT_API_KEY: KEYS.api, REFIT_ADMIN_API_KEY: KEYS.admin }), [])
  t.strictSame(await missing({ REFIT_API_KEY: KEYS.api }), [
    `GET ${url}/report answered 401: give the key by --admin-api-key, or by --api-key on a server without an admin key`
  ])
})

t.test('servers of other kinds are described by fields that are known to be harmless', async t => {
  const url = await scriptedServer(t, ({ path, reply }) => {
    if (path === '/server_info') {
      return json(reply, 200, {
        version: '0.5.23',
        tp_size: 2,
        api_key: 'sk-of-sglang',
        launch: '--api-key sk-of-sglang'
      })
    }
    if (path === '/updates') {
      return json(reply, 200, {
        updates: [{
          version: 'step-1',
          from: 'http://u:p4ss@host/x?sig=123',
          prompt: 'hidden text',
          api_key: 'zzzz9999'
        }]
      })
    }
    json(reply, 404, {})
  })
  const { out } = await runCommand(t, report, url, '--json')
  const { parts } = JSON.parse(out).server
  t.strictSame(parts.find(({ path }: any) => path === '/server_info').reply, { version: '0.5.23', tp_size: 2 })
  t.strictSame(parts.find(({ path }: any) => path === '/updates').reply.updates, [
    { version: 'step-1', from: 'http://***@host/x?***', prompt: '***', api_key: '***' }
  ])
})
