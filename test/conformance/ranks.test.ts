import t from 'tap'
import { nameRow } from '../../src/conformance/run-promises.ts'
import { keepsAll } from '../helpers/conformance/keeps-all.ts'

t.test('refit keeps all promises with two ranks and small pieces', { timeout: 600_000 }, async t => {
  // A broadcast arrives in pieces here, so a sender that dies in the middle leaves torn weights.
  const rows = await keepsAll(t, { dialect: 'sglang', tp: 2, bucketBytes: 50_000 })
  const torn = rows.find(row => nameRow(row, row.way) === 'senders/killed-mid-bytes (distributed)')
  t.match(torn?.detail, /torn/, 'torn weights were refused')
})
