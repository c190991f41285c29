import t from 'tap'
import { pickleUniqueId, rawUniqueId, unpickleUniqueId, uniqueIdAddress } from '../../src/wire/nccl-unique-id.ts'

const id = Buffer.from(Array.from({ length: 128 }, (_, i) => 3 * i % 256))
/** pickle.dumps of vLLM's ncclUniqueId, by Python 3.11. */
const pickled = Buffer.from(
  '800495ec000000000000008c075f637479706573948c095f756e7069636b6c659493948c34766c6c6d2e6469737472696275' +
    '7465642e6465766963655f636f6d6d' +
    '756e696361746f72732e70796e63636c5f77726170706572948c0c6e63636c556e6971756549649493947d94438000030609' +
    '0c0f1215181b1e2124272a2d30' +
    '3336393c3f4245484b4e5154575a5d606366696c6f7275787b7e8184878a8d909396999c9fa2a5a8abaeb1b4b7babdc0c3c6' +
    'c9cccfd2d5d8dbdee1e4e7eaedf0' +
    'f3f6f9fcff0205080b0e1114171a1d202326292c2f3235383b3e4144474a4d505356595c5f6265686b6e7174777a7d948694' +
    '869452942e',
  'hex'
)

t.test('the id that vLLM pickles is read, and written byte for byte', async t => {
  t.equal(pickled.length, 247)
  t.strictSame(unpickleUniqueId(pickled), id)
  t.strictSame(pickleUniqueId(id), pickled)
})

t.test('the class may lie in another module, and bytes may be pickled alone', async t => {
  const elsewhere = Buffer.from(
    pickled.toString('latin1').replace(
      '4vllm.distributed.device_communicators.pynccl_wrapper',
      '4fork.distributed.device_communicators.pynccl_wrapper'
    ),
    'latin1'
  )
  t.notSame(elsewhere, pickled)
  t.strictSame(unpickleUniqueId(elsewhere), id)
  t.strictSame(unpickleUniqueId(Buffer.concat([Buffer.of(0x80, 4, 0x43, 128), id, Buffer.of(0x94, 0x2e)])), id)
})

t.test('pickles with other names, lengths or shapes, and truncated ones, are refused', async t => {
  const latin = pickled.toString('latin1')
  const swap = (from: string, to: string): Buffer => Buffer.from(latin.replace(from, to), 'latin1')
  t.throws(() => unpickleUniqueId(swap('_unpickle', '_unpackle')), { code: 'PICKLE_REFUSED' })
  t.throws(() => unpickleUniqueId(swap('ncclUniqueId', 'ncclUniqueIt')), { code: 'PICKLE_REFUSED' })
  t.throws(() => unpickleUniqueId(Buffer.from('\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.', 'latin1')), {
    code: 'PICKLE_REFUSED'
  })
  t.throws(
    () => unpickleUniqueId(swap('\x7d\x94\x43\x80', '\x4e\x94\x43\x80')),
    { code: 'STORE_PROTOCOL' },
    'None in place of the attributes'
  )
  t.throws(() => unpickleUniqueId(Buffer.from('\x80\x04\x8c\x07barrier\x94.', 'latin1')), {
    code: 'STORE_PROTOCOL',
    message: /a str where/
  })
  t.throws(
    () => unpickleUniqueId(Buffer.concat([Buffer.of(0x80, 4, 0x43, 127), id.subarray(1), Buffer.of(0x94, 0x2e)])),
    { code: 'STORE_PROTOCOL', message: /of 127 bytes; 128/ }
  )
  for (let length = 0; length < pickled.length; length++) {
    t.throws(() => unpickleUniqueId(pickled.subarray(0, length)), { code: 'PICKLE_MALFORMED' }, `${length} bytes`)
  }
  t.throws(() => unpickleUniqueId(Buffer.alloc(5000)), { code: 'PICKLE_LIMIT' })
  t.throws(() => rawUniqueId(id.subarray(1)), { code: 'STORE_PROTOCOL' })
})

t.test('the address of the first rank is read out of an id', async t => {
  const four = Buffer.alloc(128)
  four.set([2, 0, 0x73, 0x3c, 10, 0, 0, 7], 8)
  t.same(uniqueIdAddress(four), { host: '10.0.0.7', port: 29500 })
  const six = Buffer.alloc(128)
  six.set([10, 0, 0x73, 0x3c, 0, 0, 0, 0, 0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7], 8)
  t.same(uniqueIdAddress(six), { host: 'fd00:0:0:0:0:0:0:7', port: 29500 })
  t.equal(uniqueIdAddress(id), undefined)
})
