import { randomBytes } from 'node:crypto'
import { rmSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { readArchitecture } from '../../src/model/read-config.ts'
import { peftTensors, testAdapter } from '../helpers/adapters.ts'
import { saveAdapter } from '../helpers/fakes/saved-adapter.ts'
import { engineServer, modelFolder } from '../helpers/gateway.ts'
import type { EngineServer } from '../helpers/gateway.ts'
import type { CheckpointTensor } from '../helpers/make-checkpoint.ts'
import { assemble, global, PROTO4, str } from '../helpers/pickles.ts'
import { pickle, sender } from '../helpers/zmq-sender.ts'

const BUFFER = 1 << 20
const STOP = assemble(PROTO4, global('builtins', 'ValueError'), '(', str('its trainer has gone'), 't', 'R', '.')

interface Exchange {
  /** Tensors of each bucket; each bucket begins at the start of the buffer. */
  buckets: ReadonlyArray<readonly CheckpointTensor[]>
  config: object
  fields?: object
  /** Default: load it. */
  path?: string
  /** The last tensor of a bucket ends the buffer, and the bytes before it belong to no tensor. */
  hasGap?: boolean
  /** Sent after the buckets, none of which is the last one then. */
  end?: Buffer | 'closed'
}

interface Loaded {
  status: number
  body: any
  answers: string[][]
}

async function adapter (folder: string, variant: number, rank = 4) {
  const only = (module: string): boolean => !/embed_tokens|lm_head/.test(module)
  const made = testAdapter(await readArchitecture(join(folder, 'adder-base')), { rank, variant, only })
  return { config: made.config, tensors: peftTensors(made) }
}

/** Loads adapter "p" from one sender for each rank, all with the same buckets. */
async function load (
  t: Test,
  { url, engine }: EngineServer,
  { buckets, config, fields = {}, path = '/load_lora_adapter_from_ipc', hasGap = false, end }: Exchange
): Promise<Loaded> {
  const dtype = global('torch', 'float32')
  const senders = await Promise.all(Array.from({ length: engine.info.ranks }, async () => {
    const name = `verl_weights_${randomBytes(16).toString('hex')}`
    const fill = (tensors: readonly CheckpointTensor[]): void => {
      const buffer = Buffer.alloc(BUFFER, 0x3f)
      for (const [index, { data }] of tensors.entries()) buffer.set(data, placesOf(tensors, hasGap)[index])
      writeFileSync(`/dev/shm/${name}`, buffer)
    }
    fill([])
    t.teardown(() => {
      rmSync(`/dev/shm/${name}`)
    })
    const messages = buckets.map((tensors, index) => {
      const places = placesOf(tensors, hasGap)
      const meta = Object.fromEntries(
        tensors.map(({ name, shape }, index) => [name, { name, dtype, shape, offset: places[index]!, handle: null }])
      )
      return pickle({ bucket_meta: meta, is_last: end === undefined && index === buckets.length - 1 })
    })
    const last = Buffer.isBuffer(end) ? [end] : []
    return await sender(t, [pickle({ name, size: BUFFER }), ...messages, ...last], message => {
      fill(buckets[message - 1] ?? [])
    })
  }))
  const reply = await fetch(url + path, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({
      lora_name: 'p',
      config_dict: config,
      zmq_handles: Object.fromEntries(senders.map(({ endpoint }, rank) => [rank, endpoint])),
      timeout: 20,
      ...fields
    })
  })
  return {
    status: reply.status,
    body: await reply.json(),
    answers: await Promise.all(senders.map(async ({ answers }) => await answers))
  }
}

/** Offsets in the buffer. */
function placesOf (tensors: readonly CheckpointTensor[], hasGap: boolean): number[] {
  let end = 0
  return tensors.map(({ data: { length } }, index) => {
    if (hasGap && index === tensors.length - 1) return BUFFER - length
    end += length
    return end - length
  })
}

/** Cuts tensors into buckets. */
function cut (tensors: readonly CheckpointTensor[], count: number): CheckpointTensor[][] {
  const size = Math.ceil(tensors.length / count)
  return Array.from({ length: count }, (_, index) => tensors.slice(index * size, (index + 1) * size))
}

for (const tp of [1, 2]) {
  t.test(`an adapter in buckets is that of a folder, and the next one replaces it, on ${tp} ranks`, async t => {
    const folder = modelFolder(t)
    const server = await engineServer(t, folder, { tp, enableLora: true })
    const digests: string[] = []
    for (const [variant, count] of [[1, 3], [2, 1], [1, 5]] as const) {
      const { config, tensors } = await adapter(folder, variant)
      const { status, body, answers } = await load(t, server, {
        buckets: cut(tensors, count),
        config,
        fields: { upsert: true }
      })
      t.equal(status, 200, JSON.stringify(body))
      t.match(body, { loaded_adapters: { p: '__tensor__' }, adapter: { name: 'p', missing_count: 0 } })
      for (const replies of answers) t.same(replies, Array.from({ length: count + 1 }, () => ''))
      const saved = await saveAdapter(join(folder, 'adder-base'), join(folder, `saved-${variant}`), variant)
      const reply = await fetch(`${server.url}/load_lora_adapter`, {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify({ lora_name: 'saved', lora_path: saved })
      })
      const { adapter: fromFolder } = await reply.json() as { adapter: { digest: string } }
      t.equal(body.adapter.digest, fromFolder.digest)
      digests.push(body.adapter.digest)
    }
    t.not(digests[0], digests[1])
    t.equal(digests[0], digests[2])
    const [{ kind, outcome }] = (await (await fetch(`${server.url}/updates`)).json() as { updates: any[] }).updates
    t.same([kind, outcome], ['adapter', 'done'])
  })
}

t.test('a refused adapter is received to its end, and the version before stays', async t => {
  const folder = modelFolder(t)
  const server = await engineServer(t, folder, { tp: 2, enableLora: true, lora: { maxLoraRank: 4 } })
  const { config, tensors } = await adapter(folder, 1)
  t.match(await load(t, server, { buckets: cut(tensors, 2), config }), { status: 200 })
  const before = server.engine.adapters!.list()
  const large = await adapter(folder, 2, 8)
  const unknown = tensors.map((tensor, index) =>
    index === tensors.length - 1 ? { ...tensor, name: 'model.no_such.lora_A.weight' } : tensor
  )
  const half = tensors.slice(0, -1)
  const rank = /rank 8, and this server takes at most 4 \(--max-lora-rank\)/
  for (
    const [name, exchange, words, last] of [
      ['a name that is taken', { buckets: cut(tensors, 3), config }, /already loaded/, 2],
      ['a large rank', { buckets: cut(large.tensors, 3), config: large.config }, rank, 2],
      ['DoRA', { buckets: cut(tensors, 3), config: { ...config, use_dora: true } }, /use_dora/, 2],
      ['a name of no module in the last bucket', { buckets: cut(unknown, 3), config }, /no_such/, 2],
      ['a tensor twice', { buckets: [tensors, [tensors[0]!]], config }, /are the same half/, 1],
      ['a missing half', { buckets: cut(half, 3), config }, /is missing/, 2],
      ['no tensors', { buckets: [[]], config }, /verl has sent no weight/, 0]
    ] as const
  ) {
    const fields = name === 'a name that is taken' ? {} : { upsert: true }
    const { status, body, answers } = await load(t, server, { ...exchange, fields })
    t.equal(status, 400, name)
    t.match(body.error_message, /^LoRA adapter "p": /, name)
    t.match(body.error_message, words, name)
    for (const replies of answers) {
      t.equal(replies.length, last + 2, `${name}: all buckets have a reply`)
      t.match(replies.at(-1), words, `${name}: the last reply has the reason`)
      // Tensors that fit no adapter of the model are not kept until the end.
      if (name === 'a large rank') t.match(replies[1], words, `${name}: so has the reply to the first bucket`)
    }
    t.same(server.engine.adapters!.list(), before, name)
  }
  const stopped = await load(t, server, { buckets: [half], config, fields: { upsert: true }, end: STOP })
  t.match(stopped, { status: 400, body: { error_message: /ValueError: its trainer has gone\. Nothing has changed/ } })
  const closed = await load(t, server, { buckets: [half], config, fields: { upsert: true }, end: 'closed' })
  t.match(closed, { status: 502, body: { error: { code: 'ZMQ_UNREACHABLE' } } })
  t.same(server.engine.adapters!.list(), before)
  t.match(await load(t, server, { buckets: cut(tensors, 2), config, fields: { upsert: true } }), {
    status: 200,
    body: { adapter: { replaced: 1, digest: before[0]!.digest } }
  })
})

t.test('buckets that reach over more bytes than the model has are refused, and received to their end', async t => {
  const folder = modelFolder(t)
  const server = await engineServer(t, folder, { tp: 2, enableLora: true })
  const { config, tensors } = await adapter(folder, 1)
  const most = server.engine.info.weightBytes
  // Each copy reaches over nearly all of a buffer, though its tensors are small.
  const fits = Math.floor(most / BUFFER)
  const sent = (count: number): Exchange => ({ buckets: cut(tensors, count), config, hasGap: true })
  const count = fits + 3
  t.ok(tensors.length >= 2 * count)
  t.ok(tensors.reduce((sum, { data }) => sum + data.length, 0) < most)
  const { status, body, answers } = await load(t, server, sent(count))
  const taken = (fits + 1) * BUFFER
  const words = new RegExp(`buckets take ${taken} bytes so far, more than the model's weights \\(${most}\\)`)
  t.equal(status, 400)
  t.match(body.error_message, words)
  for (const replies of answers) {
    t.equal(replies.length, count + 1, 'all buckets have a reply')
    t.same(replies.slice(0, fits + 1), Array.from({ length: fits + 1 }, () => ''), 'they are taken up to the limit')
    t.match(replies[fits + 1], words, 'the bucket that exceeds it has the reason')
    t.match(replies.at(-1), words)
  }
  t.same(server.engine.adapters!.list(), [])
  t.match(await load(t, server, { buckets: cut(tensors, count), config }), { status: 200 }, 'without gaps it fits')
})

t.test('a server without adapters receives the buckets, and says how to enable them', async t => {
  const folder = modelFolder(t)
  const server = await engineServer(t, folder)
  const { config, tensors } = await adapter(folder, 1)
  const { status, body, answers } = await load(t, server, { buckets: cut(tensors, 3), config })
  t.equal(status, 400)
  t.match(body.error_message, /LoRA is not enabled: start the server with --enable-lora/)
  t.equal(answers[0]!.length, 4)
  t.match(answers[0]!.at(-1), /--enable-lora/)
})

t.test('an adapter among weights is refused at once, also in the last bucket', async t => {
  const folder = modelFolder(t)
  const server = await engineServer(t, folder, { tp: 2, enableLora: true })
  const { config, tensors } = await adapter(folder, 1)
  const { status, body, answers } = await load(t, server, {
    buckets: [tensors],
    config,
    path: '/update_weights_from_ipc'
  })
  t.equal(status, 400)
  t.match(body.message, /is a part of a LoRA adapter, and this request updates the model's own weights/)
  for (const replies of answers) t.match(replies, ['', /is a part of a LoRA adapter/])
})

t.test('requests that run finish on the version that a sender replaces', async t => {
  const folder = modelFolder(t)
  const server = await engineServer(t, folder, { enableLora: true })
  const first = await adapter(folder, 1)
  await load(t, server, { buckets: cut(first.tensors, 2), config: first.config })
  const post = async (maxNewTokens: number): Promise<any> => {
    const reply = await fetch(`${server.url}/generate`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({
        text: '1',
        lora_path: 'p',
        sampling_params: { max_new_tokens: maxNewTokens, ignore_eos: true }
      })
    })
    return (await reply.json() as any).meta_info.lora
  }
  const running = post(100)
  while (server.engine.adapters!.get('p')!.requests === 0) await new Promise(resolve => setImmediate(resolve))
  const next = await adapter(folder, 2)
  await load(t, server, { buckets: cut(next.tensors, 2), config: next.config, fields: { upsert: true } })
  t.match(await post(1), { name: 'p', version: 2 })
  t.match(await running, { name: 'p', version: 1 })
})
