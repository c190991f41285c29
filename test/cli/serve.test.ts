import t from 'tap'
import { serve } from '../../src/cli/serve.ts'

t.test('an unknown dialect is refused before anything is loaded', async t => {
  // No model can be loaded from it.
  const folder = t.testdir({ 'config.json': '{}' })
  await t.rejects(
    serve([folder, '--port', '0', '--log-level', 'silent', '--skip-tokenizer-init', '--dialects', 'vlmm']),
    { code: 'CONFIG', param: 'dialects', message: /--dialects: expected vllm, .*got "vlmm"/ }
  )
})
