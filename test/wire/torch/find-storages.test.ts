import t from 'tap'
import { readTensorBody } from '../../../src/wire/torch/body.ts'
import { findStorages } from '../../../src/wire/torch/find-storages.ts'
import { pickledTensor } from '../../../src/conformance/transports/pickle-writer.ts'
import { assemble, bin, describeStorage, global, PROTO4, recordedPickles, str } from '../../helpers/pickles.ts'

const payloads = recordedPickles('payloads')

t.test('the storages of a good request are found, also those offered to GPUs that no rank has', async t => {
  for (const { name, entries, expected } of payloads) {
    const order = (list: object[]): string[] => list.map(storage => JSON.stringify(storage)).sort()
    t.same(order(findStorages(entries).map(describeStorage)), order([...expected.storages, ...expected.spares]), name)
  }
})

t.test('the readable storages of a refused request are found in all its entries', async t => {
  const refused = recordedPickles('refused')
  for (
    const name of [
      'an empty name',
      'integers',
      'a dict of GPUs without names',
      'an extent beyond the storage',
      'a triple',
      'a slot that stands for two storages',
      'a piece beyond the bucket'
    ]
  ) {
    const { entries, load_format: loadFormat, ranks } = refused.find(found => found.name === name)!
    t.throws(() => readTensorBody({ entries, loadFormat, ranks }))
    t.equal(findStorages(entries).length, 1, name)
  }
  const good = payloads.find(({ name }) => name === 'an entry per rank, one of them empty')!.entries
  const bad = refused.find(({ name }) => name === 'a tensor pickled with its data')!.entries
  t.equal(findStorages([...bad, ...good, 'not base64', ...good]).length, 2)
})

t.test('handles in a pickle that was refused for its names are found', async t => {
  const refused = recordedPickles('refused')
  for (
    const name of ['a DTensor', 'a DTensor as a parameter', 'an adapter', "a tensor on other GPUs than the rank's"]
  ) {
    t.ok(findStorages(refused.find(found => found.name === name)!.entries).length > 0, name)
  }
  const exploit = recordedPickles('exploits').find(({ name }) =>
    name === 'a call that stands in a list of good tensors'
  )!
  t.equal(findStorages([exploit.pickle]).length, 1, 'the good one')
})

t.test('a pickle in a pickle is read, one in that is not', async t => {
  const memory = { name: '/torch_12_34_0', bytes: 64 }
  const tensor = assemble(PROTO4, pickledTensor({ name: 'a', memory, shape: [4] }), '.')
  const local = (inner: Buffer): Buffer =>
    assemble(PROTO4, global('x', 'LocalSerializedTensor'), ')\x81}', str('values'), ']', bin(inner), 'asb.')
  t.equal(findStorages([local(tensor)]).length, 1)
  t.equal(findStorages([local(local(tensor))]).length, 0, 'nobody sends it, and chains of them take long')
})

t.test('hostile pickles have no storages, and the search costs no more than reading them', async t => {
  for (const { pickle } of recordedPickles('exploits')) t.ok(findStorages([pickle]).length <= 1)
  const cycle = assemble(PROTO4, ']\x94h\x00ah\x00a}\x94h\x01h\x01sa.')
  t.same(findStorages([cycle]), [])
  const inner = assemble('\x80\x04', ']'.repeat(4000), '0'.repeat(3999), '.')
  const locals = assemble(
    global('x', 'LocalSerializedTensor'),
    '\x94)\x81}\x94',
    str('values'),
    ']',
    bin(inner),
    '\x94asb'
  )
  const again = Buffer.concat(Array.from({ length: 20_000 }, () => assemble('h\x00)\x81h\x01b')))
  t.same(findStorages([assemble(PROTO4, '(', locals, again, 't.')]), [])
})
