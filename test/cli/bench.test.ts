import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { bench } from '../../src/cli/bench.ts'
import type { LoadSummary } from '../../src/load/summary.ts'
import { serveModel } from '../helpers/conformance/served-model.ts'
import { runCommand } from '../helpers/cli/run-command.ts'
import { json, scriptedServer } from '../helpers/load/scripted-server.ts'

t.test('wrong arguments are refused with what was expected', async t => {
  const refused = async (message: RegExp, ...args: string[]): Promise<unknown> =>
    await t.rejects(bench(args), { code: 'CONFIG', message })
  await refused(/bench: needs the URL/)
  await refused(/expected a URL such as .*, got "127\.0\.0\.1"/, '127.0.0.1')
  await refused(/must not contain a name or a password/, 'http://me:secret@a')
  await refused(/--concurrency: expected an integer from 1 to 65536, got "0"/, 'http://a', '--concurrency', '0')
  await refused(/--concurrency .* or --rate .*, not both/, 'http://a', '--concurrency', '1', '--rate', '1')
  await refused(/--rate: expected a number from 0\.001 to 100000, got "fast"/, 'http://a', '--rate', 'fast')
  await refused(/--prompt: expected 512, uniform:.*got "long"/, 'http://a', '--prompt', 'long')
  await refused(/--api: expected one of sglang, .*got "trt"/, 'http://a', '--api', 'trt')
  await refused(/--token-ids: expected two ids such as 1000-9999, got "9-1"/, 'http://a', '--token-ids', '9-1')
  await refused(/Unknown option '--requets'/, 'http://a', '--requets', '1')
})

t.test('a server that cannot be reached is exit code 2', async t => {
  const { err, code } = await runCommand(t, bench, 'http://127.0.0.1:9')
  t.equal(code, 2)
  t.match(err, /http:\/\/127\.0\.0\.1:9 cannot be reached/)
})

t.test('failed requests are exit code 1, and the table names them', async t => {
  const url = await scriptedServer(t, ({ path, reply }) =>
    path === '/v1/models'
      ? json(reply, 200, { data: [{ id: 'm', owned_by: 'vllm' }] })
      : json(reply, 429, { error: { code: 'rate_limit', message: 'slower' } }))
  const { out, code } = await runCommand(t, bench, url, '--requests', '3', '--warmup', '0', '--prompt', '4')
  t.equal(code, 1)
  t.match(out, /^vllm, API vllm, model m$/m)
  t.match(out, /^requests +0 of 3 in /m)
  t.match(out, /^error +3 x 429 rate_limit: slower$/m)
})

t.test('the key is sent, from the flag or from the environment', async t => {
  const keys = new Set<string | undefined>()
  const url = await scriptedServer(t, ({ headers, reply }) => {
    keys.add(headers.authorization)
    json(reply, 401, { error: 'Unauthorized' })
  })
  const flag = await runCommand(t, bench, url, '--api-key', 'one')
  const err = `refit: GET ${url}/v1/models answered 401: give the key by --api-key or REFIT_API_KEY\n`
  t.match(flag, { code: 2, err })
  t.intercept(process, 'env', { value: { ...process.env, REFIT_API_KEY: 'two' } })
  await runCommand(t, bench, url)
  t.strictSame([...keys], ['Bearer one', 'Bearer two'])
})

t.test('against a real server, with each API', async t => {
  const { url } = await serveModel(t)
  const generated = async (): Promise<number> => {
    const text = await (await fetch(`${url}/metrics`)).text()
    return Number(/^refit:generation_tokens_total\S* (\d+)$/m.exec(text)?.[1] ?? NaN)
  }
  const file = join(t.testdir(), 'result.json')
  const run = async (...args: string[]): Promise<LoadSummary & { server: object }> => {
    const before = await generated()
    const { out, code } = await runCommand(t, bench, url, '--json', file, '--warmup', '2', '--seed', '5', ...args)
    t.equal(code, 0, out)
    const summary = JSON.parse(readFileSync(file, 'utf8')) as LoadSummary & { server: object }
    const warmup = 2 * summary.settings.samples * (summary.settings.output as { tokens: number }).tokens
    t.equal(await generated() - before, summary.tokens.output + warmup, 'the server counts the same tokens')
    t.match(out, /^inter-token latency( +[\d.]+){6}$/m)
    return summary
  }
  const shape = ['--prompt', 'uniform:4-20', '--output', '8', '--requests', '6']

  const sglang = await run(...shape, '--concurrency', '3', '--samples', '2')
  t.match(sglang, {
    url,
    server: { kind: 'refit', vocabulary: 260, api: 'sglang' },
    requests: { sent: 6, succeeded: 6, failed: 0 },
    errors: [],
    tokens: { output: 96 },
    time_to_first_token_ms: { count: 12 },
    time_per_output_token_ms: { count: Number },
    request_ms: { count: 6 },
    weight_versions: { default: 12 },
    in_flight: { max: 3 }
  })
  t.ok(sglang.inter_token_ms.count <= 96 - 12 && sglang.inter_token_ms.count >= sglang.gap_ms.count)
  t.ok(sglang.tokens.prompt >= 24 && sglang.tokens.prompt <= 120)
  t.ok(sglang.time_to_first_token_ms.max! <= sglang.request_ms.max!)

  const vllm = await run(...shape, '--rate', '200', '--samples', '2', '--api', 'vllm')
  t.match(vllm, { requests: { succeeded: 6 }, tokens: { output: 96 }, time_to_first_token_ms: { count: 12 } })
  t.equal(vllm.tokens.prompt, sglang.tokens.prompt, 'the same seed has the same prompts, whatever the API and the loop')

  for (const api of ['openai', 'chat']) {
    const text = await run(...shape, '--concurrency', '2', '--api', api, '--ignore-eos')
    t.match(text, { settings: { api }, requests: { succeeded: 6 }, tokens: { output: 48, prompt: Number } }, api)
    t.ok(text.tokens.prompt > 24, api)
  }
})
