import t from 'tap'
import { verifyChecksums } from '../../src/peer/weight-receiver.ts'

const own = [{ name: 'a', checksum: '01' }, { name: 'b', checksum: '02' }]

t.test('checksums of sender and receiver must be equal, tensor by tensor', async t => {
  t.doesNotThrow(() => {
    verifyChecksums(own, { a: '01', b: '02' })
  })
  t.throws(() => {
    verifyChecksums(own, { a: '01', b: '03' })
  }, { code: 'WEIGHTS_MISMATCH', message: /checksums differ \(b\)/ })
  t.throws(() => {
    verifyChecksums(own, { a: '01' })
  }, { code: 'WEIGHTS_MISMATCH', message: /\(b\)/ })
  t.throws(() => {
    verifyChecksums(own, { a: '01', b: '02', c: '03' })
  }, { code: 'WEIGHTS_MISMATCH', message: /1 more tensors/ })
  t.throws(() => {
    verifyChecksums(own, {})
  }, { code: 'WEIGHTS_MISMATCH', message: /\(a, b\)/ })
})
