import { MessageChannel, receiveMessageOnPort } from 'node:worker_threads'
import t from 'tap'
import { readTensorBody } from '../../../src/wire/torch/body.ts'
import { packTensorBody, unpackTensorBody } from '../../../src/wire/torch/packed.ts'
import type { PackedTensorBody } from '../../../src/wire/torch/packed.ts'
import { recordedPickles } from '../../helpers/pickles.ts'

t.test('a body that is packed, posted to another thread and unpacked keeps its values and shared objects', async t => {
  const { port1, port2 } = new MessageChannel()
  for (
    const { name, entries, load_format: loadFormat, ranks, gpus, any_dtype: anyDType } of recordedPickles('payloads')
  ) {
    const { spares, ...body } = readTensorBody({ entries, loadFormat, ranks, gpus }, { anyDType })
    t.notOk(spares.some(spare => body.storages.includes(spare)))
    const packed = packTensorBody(body)
    port1.postMessage(packed, [packed.numbers.buffer])
    t.equal(packed.numbers.length, 0, 'transferred, not copied')
    const got = unpackTensorBody((receiveMessageOnPort(port2) as { message: PackedTensorBody }).message)
    t.strictSame(got, body, name)
    for (const [rank, tensors] of body.ranks.entries()) {
      t.same(body.ranks.map(other => other === tensors), got.ranks.map(other => other === got.ranks[rank]))
      for (const [i, { storage }] of tensors.entries()) {
        t.equal(
          got.storages.indexOf(got.ranks[rank]![i]!.storage),
          body.storages.indexOf(storage)
        )
      }
    }
    const handles = (list: typeof body.storages): number =>
      new Set(list.map(storage => storage.kind === 'cuda' ? storage.handle : undefined)).size
    t.equal(handles(got.storages), handles(body.storages), 'one segment stays one object')
  }
  port1.close()
})

t.test('many numbers are packed and unpacked', async t => {
  const tensors = Array.from(
    { length: 5000 },
    (_, i) => ({
      name: `w${i}`,
      dtype: 'float32',
      shape: [i],
      stride: [1],
      offset: 2 ** 50 + i,
      storage: { kind: 'empty', bytes: 0 } as const
    })
  )
  const body = { ranks: [tensors, [], tensors], storages: [] }
  t.strictSame(unpackTensorBody(packTensorBody(body)), body)
})
