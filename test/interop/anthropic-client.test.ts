import { execFile } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import t from 'tap'
import { buildServer } from '../../src/app/server.ts'
import { ByteTokenizer } from '../helpers/byte-tokenizer.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'

// Needs a Python with the anthropic package: $REFIT_PYTHON, else python3. Skipped without it; with
// REFIT_REQUIRE_INTEROP=1 it fails instead.

const run = promisify(execFile)
const python = process.env['REFIT_PYTHON'] ?? 'python3'
const script = fileURLToPath(new URL('./anthropic_client.py', import.meta.url))

const missing = await run(python, ['-c', 'import anthropic']).then(() => null, (error: Error) => error.message)

if (missing !== null) {
  t.comment(`NOT TESTED against the anthropic client: ${python} cannot import it. Set REFIT_PYTHON.`)
  if (process.env['REFIT_REQUIRE_INTEROP'] === '1') {
    t.fail('the anthropic client is required here (REFIT_REQUIRE_INTEROP=1)')
  } else t.pass('the anthropic client is missing', { skip: true })
} else {
  t.test('the official anthropic client works unchanged', async t => {
    const engine = new FakeEngine()
    const call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    engine.script = [...Buffer.from(`<think>hm</think>See.\n${call}`), 2]
    const app = await buildServer({
      engine,
      tokenizer: new ByteTokenizer(),
      toolCallParser: 'qwen25',
      reasoningParser: 'qwen3',
      port: 0,
      apiKey: 'secret',
      closeGraceMs: 100
    })
    t.teardown(async () => await app.close())
    const { port } = app.server.address() as { port: number }
    const { stdout } = await run(python, [script, `http://127.0.0.1:${port}`], { timeout: 60_000 })
    t.match(stdout, /^ok /)
  })
}
