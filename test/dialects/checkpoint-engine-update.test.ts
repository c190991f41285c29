import { randomBytes } from 'node:crypto'
import { rmSync, writeFileSync } from 'node:fs'
import t from 'tap'
import type { Test } from 'tap'
import { engineServer, modelFolder } from '../helpers/gateway.ts'
import { global } from '../helpers/pickles.ts'
import { pickle, sender } from '../helpers/zmq-sender.ts'

const NORM = 'model.norm.weight'
const LAYER = 'model.layers.0.input_layernorm.weight'

interface Message {
  names: readonly string[]
  isLast?: boolean
  handle?: number | null
}

/** A bucket of verl with tensors of zeros. */
function bucket ({ names, isLast = false, handle = null }: Message, size: number): Buffer {
  const dtype = global('torch', 'float32')
  return pickle({
    bucket_meta: Object.fromEntries(names.map(name => [name, { name, dtype, shape: [size], offset: 0, handle }])),
    is_last: isLast
  })
}

/** The outcome of an update whose two senders send these messages, and the weights after it. */
async function exchange (
  t: Test,
  { url, size }: { url: string, size: number },
  bySlot: readonly [readonly Message[], readonly Message[]]
): Promise<{ status: number, body: any, answers: string[][] }> {
  const senders = await Promise.all(bySlot.map(async messages => {
    const name = `verl_weights_${randomBytes(16).toString('hex')}`
    writeFileSync(`/dev/shm/${name}`, Buffer.alloc(4096))
    t.teardown(() => {
      rmSync(`/dev/shm/${name}`)
    })
    return await sender(t, [pickle({ name, size: 4096 }), ...messages.map(message => bucket(message, size))])
  }))
  const reply = await fetch(`${url}/update_weights_from_ipc`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({
      zmq_handles: Object.fromEntries(senders.map(({ endpoint }, rank) => [rank, endpoint])),
      weight_version: 'new'
    })
  })
  return {
    status: reply.status,
    body: await reply.json(),
    answers: await Promise.all(senders.map(async ({ answers }) => await answers))
  }
}

t.test('different buckets of the senders of one engine are refused, and nothing is written', async t => {
  const { url, engine } = await engineServer(t, modelFolder(t), { tp: 2 })
  // The hidden size of the adder model.
  const target = { url, size: 96 }
  const before = await engine.checksums()
  for (
    const [name, first, second, words] of [
      [
        'the last bucket for the second one alone',
        [{ names: [NORM] }],
        [{ names: [NORM], isLast: true }],
        /for one this bucket is the last one/
      ],
      [
        'the last bucket for the first one alone',
        [{ names: [NORM], isLast: true }],
        [{ names: [NORM] }],
        /for one this bucket is the last one/
      ],
      ['nothing of the first one', [{ names: [] }], [{ names: [NORM] }], /a bucket of 1 tensors, another of 0/],
      ['nothing of the second one', [{ names: [NORM] }], [{ names: [] }], /a bucket of 0 tensors, another of 1/],
      [
        'a handle of the first one alone',
        [{ names: [NORM], handle: 1 }],
        [{ names: [], handle: null }],
        /by its own handle/
      ],
      [
        'other tensors',
        [{ names: [NORM] }],
        [{ names: [LAYER] }],
        /tensor 0 of the bucket is model\.layers\.0\.input_layernorm\.weight for one, model\.norm\.weight for another/
      ]
    ] as const
  ) {
    const { status, body, answers } = await exchange(t, target, [first, second])
    t.equal(status, 502, name)
    t.match(body, { error: { code: 'ZMQ_PROTOCOL', message: words } }, name)
    for (const [, answer] of answers) t.match(answer, /senders are not at the same step/, name)
    t.same(await engine.checksums(), before, name)
  }
  const { status, answers } = await exchange(t, target, [[{ names: [NORM] }, { names: [], isLast: true }], [{
    names: [NORM]
  }, { names: [], isLast: true }]])
  t.equal(status, 200)
  t.same(answers, [['', '', ''], ['', '', '']])
  t.equal(engine.weightVersion, 'new')
  const after = await engine.checksums()
  t.same(
    after.tensors.filter((tensor, i) => JSON.stringify(tensor) !== JSON.stringify(before.tensors[i])).map(({ name }) =>
      name
    ),
    [NORM]
  )
})
