import t from 'tap'
import { keepsAll } from '../helpers/conformance/keeps-all.ts'

t.test("refit keeps all promises by SGLang's routes", { timeout: 600_000 }, async t => {
  await keepsAll(t, { dialect: 'sglang' })
})
