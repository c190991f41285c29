import { execFile } from 'node:child_process'
import { join } from 'node:path'
import { promisify } from 'node:util'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'
import { tinyChat } from '../e2e/tiny-chat.ts'

// Needs a Python with the openai package: $REFIT_PYTHON, else python3. Skipped without it; with REFIT_REQUIRE_INTEROP=1
// it fails instead.

const run = promisify(execFile)
const python = process.env['REFIT_PYTHON'] ?? 'python3'
const missing = await run(python, ['-c', 'import jsonschema, openai']).then(() => false, () => true)

if (missing && process.env['REFIT_REQUIRE_INTEROP'] !== '1') {
  t.comment(`NOT TESTED against the openai client: ${python} cannot import openai and jsonschema. Set REFIT_PYTHON.`)
  t.pass('the openai client is missing', { skip: true })
} else {
  t.test('calls and structured output work with the official openai client', async t => {
    const url = await (await tinyChat(t))({ reasoningParser: 'qwen3' })
    const { stdout } = await run(python, [join(packageRoot, 'test/interop/openai_tools.py'), url], { timeout: 120_000 })
    t.match(stdout, /^ok /)
  })
}
