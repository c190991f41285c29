import t from 'tap'
import { compareChecksums } from '../../src/peer/weight-receiver.ts'

const own = [{ name: 'a', checksum: '01' }, { name: 'b', checksum: '02' }]

t.test('checksums of sender and receiver must be the same, tensor by tensor', async t => {
  t.doesNotThrow(() => {
    compareChecksums(own, { a: '01', b: '02' })
  })
  t.throws(() => {
    compareChecksums(own, { a: '01', b: '03' })
  }, { code: 'WEIGHTS_MISMATCH', message: /checksums differ \(b\)/ })
  t.throws(() => {
    compareChecksums(own, { a: '01' })
  }, { code: 'WEIGHTS_MISMATCH', message: /\(b\)/ })
  t.throws(() => {
    compareChecksums(own, { a: '01', b: '02', c: '03' })
  }, { code: 'WEIGHTS_MISMATCH', message: /1 tensors more/ })
  t.throws(() => {
    compareChecksums(own, {})
  }, { code: 'WEIGHTS_MISMATCH', message: /\(a, b\)/ })
})
