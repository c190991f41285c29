import t from 'tap'
import { setTimeout as sleep } from 'node:timers/promises'
import { KeptTensors } from '../../src/sources/tensor/kept-tensors.ts'
import { TensorSource } from '../../src/sources/tensor/tensor.ts'

// Tensors are kept while no mapping is closed, for example while a transaction is open and no write arrives.

function sourceOf (released: () => void): TensorSource {
  return new TensorSource({
    tensors: [],
    sources: [{ segment: { uuid: 'GPU-0', handle: new Uint8Array(64), events: new Uint8Array() } }],
    layout: 'checkpoint',
    hold: {
      isOpen: () => true,
      findGone: async () => null,
      release: async () => {
        released()
      }
    },
    closed: () => {}
  })
}

t.test('a shutdown has a deadline for a release whose mappings stay open', async t => {
  const asked: string[] = []
  const kept = new KeptTensors({
    closeMappings: async mapping => {
      asked.push(mapping)
      await new Promise(() => {})
    }
  })
  let released = 0
  await kept.keep(
    { name: 'pool', generation: 1 },
    sourceOf(() => {
      released++
    }),
    async source => {
      await source.verify()
      await source.close()
    }
  )
  let isDone = false
  const releasing = kept.release('pool').finally(() => {
    isDone = true
  })
  await sleep(50)
  t.same(asked, ['1'])
  t.notOk(isDone, 'a request waits as long as it takes')
  t.equal(released, 0, 'memory that is still mapped is not released')
  await kept.close()
  t.same(await releasing, [{ name: 'pool', generation: 1 }])
  t.equal(released, 1)
  t.same(kept.stats, { names: 0, bytes: 0 })
  await t.rejects(
    kept.keep(
      { name: 'pool', generation: 2 },
      sourceOf(() => {
        released++
      }),
      async () => {}
    ),
    { code: 'ENGINE_CLOSED' }
  )
  t.equal(released, 2)
})
