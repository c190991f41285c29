import t from 'tap'
import { keepsAll } from '../helpers/conformance/keeps-all.ts'

t.test("refit keeps all promises by vLLM's routes", { timeout: 600_000 }, async t => {
  await keepsAll(t, {
    dialect: 'vllm',
    notOffered: new RegExp(
      '^(payloads|files/too-long|identity/read-back|refusals/empty \\(distributed\\)|concurrency/two-updates|' +
        'pauses/(holds|held-gets-new) \\((abort|wait)\\))'
    )
  })
})
