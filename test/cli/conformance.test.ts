import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import { conformance } from '../../src/cli/conformance.ts'
import { runCommand } from '../helpers/cli/run-command.ts'
import { MODEL, serveModel } from '../helpers/conformance/served-model.ts'

t.test('wrong arguments are refused with what was expected', async t => {
  const refused = async (message: RegExp, ...args: string[]): Promise<unknown> =>
    await t.rejects(conformance(args), { code: 'CONFIG', message })
  await refused(/needs the URL/)
  await refused(/expected a URL such as .*, got "127\.0\.0\.1"/, '127.0.0.1')
  await refused(/takes one URL, got also http:\/\/b/, 'http://a', 'http://b')
  await refused(/needs --model FOLDER/, 'http://a')
  await refused(
    /--patience: expected seconds from 1 to 86400, got "soon"/,
    'http://a',
    '--model',
    'x',
    '--patience',
    'soon'
  )
  await refused(/--dialect: expected sglang or vllm, got "trt"/, 'http://a', '--model', 'x', '--dialect', 'trt')
  await refused(/--transports: .*got "nccl"/, 'http://a', '--model', 'x', '--transports', 'disk,nccl')
  await refused(/Unknown option '--models'/, 'http://a', '--models', 'x')
})

t.test('--list prints every promise with its title', async t => {
  const { out } = await runCommand(t, conformance, '--list')
  t.match(out, /^identity\/round-trip +After B, A, C, A the server answers as with B, A, C, A\.$/m)
})

t.test('a server that cannot be reached, or has no such routes, is exit code 2', async t => {
  const { err, code } = await runCommand(t, conformance, 'http://127.0.0.1:9', '--model', MODEL)
  t.equal(code, 2)
  t.match(err, /http:\/\/127\.0\.0\.1:9 cannot be reached/)
  const other = createServer((_request, reply) => reply.writeHead(404).end('{}'))
  await new Promise<void>(resolve => other.listen(0, '127.0.0.1', resolve))
  t.teardown(() => other.close())
  const there = await runCommand(
    t,
    conformance,
    `http://127.0.0.1:${(other.address() as AddressInfo).port}`,
    '--model',
    MODEL
  )
  t.equal(there.code, 2)
  t.match(there.err, /has no routes of vLLM/)
})

t.test('the table is printed and written, and nothing is left in the folder', async t => {
  const { url, options } = await serveModel(t)
  const file = join(mkdtempSync(join(tmpdir(), 'refit-conformance-json-')), 'rows.json')
  t.teardown(() => rmSync(join(file, '..'), { recursive: true }))
  const folder = options.work.path
  const { out, code } = await runCommand(
    t,
    conformance,
    url,
    '--model',
    MODEL,
    '--folder',
    folder,
    '--only',
    'no-folder',
    '--json',
    file
  )
  t.match(out, /^kept +files\/no-folder \(disk\): 400: .*\n\n1 kept, 0 broken\n$/)
  t.not(code, 1)
  t.match(JSON.parse(readFileSync(file, 'utf8')), { url, rows: [{ id: 'no-folder', way: 'disk', verdict: 'kept' }] })
  t.same(readdirSync(folder), [])
})

t.test('a folder that is no checkpoint is refused', async t => {
  const { url, options } = await serveModel(t)
  const model = join(options.work.path, 'empty')
  mkdirSync(model)
  writeFileSync(join(model, 'config.json'), '{}')
  await t.rejects(runCommand(t, conformance, url, '--model', model), {
    code: 'CHECKPOINT_PATH',
    message: /has neither model\.safetensors nor/
  })
})
