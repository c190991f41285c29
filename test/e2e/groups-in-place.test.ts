import t from 'tap'
import { joinRegex } from '../helpers/join-regex.ts'
import type { Test } from 'tap'
import type { ModelTable } from '../../src/model/architecture.ts'
import type { ArchitectureName } from '../../src/model/families.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import type { ServerOptions } from '../../src/app/server.ts'
import type { EngineOptions } from '../../src/engine/engine-options.ts'
import { checkVariant } from '../helpers/cuda-model.ts'
import { cudaServer, useStandIn } from '../helpers/cuda-tensors.ts'
import type { CudaServer, Reply } from '../helpers/cuda-tensors.ts'
import { eventually } from '../helpers/eventually.ts'
import { codedTensor } from '../helpers/memory-source.ts'
import { NcclTrainer, useLoop } from '../helpers/nccl-trainer.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// Broadcasts over NCCL that are received straight into the weights, on simulated GPUs. In the stand-in for NCCL
// (nccl_loop.cc) a broadcast never ends if its size differs from its root's.

useStandIn()
const loop = useLoop()

const UPDATE = '/update_weights_from_distributed'
/** Size of a vector after which the next parameter follows without a gap: the stand-in aligns to 64 bytes. */
const WIDE = { head_dim: 32 }
/** Value in tinyConfig. */
const EXPERTS = 8

/**
 * Names as state_dict() of transformers gives them, modules in the order in which they are made. `experts`: as version
 * 4 and 5 have them.
 */
function stateDict (architecture: ArchitectureName, layers: number, experts: 'each' | 'fused' = 'fused'): string[] {
  const attention = ['q_proj', 'k_proj', 'v_proj']
    .flatMap(
      name => [`self_attn.${name}.weight`, ...architecture === 'Qwen2ForCausalLM' ? [`self_attn.${name}.bias`] : []]
    )
    .concat(
      'self_attn.o_proj.weight',
      architecture.startsWith('Qwen3') ? ['self_attn.q_norm.weight', 'self_attn.k_norm.weight'] : []
    )
  const dense = ['gate', 'up', 'down'].map(name => `mlp.${name}_proj.weight`)
  const each = [
    'mlp.gate.weight',
    ...Array
      .from({ length: EXPERTS }, (_, e) => ['gate', 'up', 'down'].map(name => `mlp.experts.${e}.${name}_proj.weight`))
      .flat()
  ]
  const sparse = experts === 'fused' ? ['mlp.experts.gate_up_proj', 'mlp.experts.down_proj', 'mlp.gate.weight'] : each
  const norms = ['input_layernorm.weight', 'post_attention_layernorm.weight']
  const names = ['model.embed_tokens.weight']
  for (let i = 0; i < layers; i++) {
    // tinyConfig: the second layer of the mixture is dense.
    const mlp = architecture === 'Qwen3MoeForCausalLM' && i !== 1 ? sparse : dense
    names.push(...[...attention, ...mlp, ...norms].map(name => `model.layers.${i}.${name}`))
  }
  return [...names, 'model.norm.weight', ...architecture === 'Qwen2ForCausalLM' ? [] : ['lm_head.weight']]
}

interface World {
  server: CudaServer
  trainer: NcclTrainer
  table: ModelTable
  /** Bytes of the tensors in bfloat16. */
  bytesOf: (names: readonly string[]) => number
  /** In bfloat16, position-coded. */
  dataOf: (variant: number, name: string) => Uint8Array
  announce: (names: readonly string[], fields?: Record<string, unknown>) => Record<string, unknown>
  send: (variant: number, names: readonly string[], isBucket?: boolean) => Promise<void>
  update: (variant: number, names: readonly string[], fields?: Record<string, unknown>) => Promise<Reply>
}

async function world (
  t: Test,
  config: Record<string, unknown>,
  tp = 1,
  options: Partial<ServerOptions> = {},
  engine: EngineOptions = {}
): Promise<World> {
  const server = await cudaServer(t, config, { tp, ...engine }, { ncclPath: loop, groupTimeoutMs: 60_000, ...options })
  const trainer = await join(t, server, tp)
  const table = buildModelTable(parseModelConfig(config), tp)
  const elements = (name: string): number => table.tensors.get(name)!.shape.reduce((product, size) => product * size, 1)
  const bytes = (variant: number, name: string): Uint8Array => {
    const fused = /^(.*\.experts)\.(gate_up|down)_proj$/.exec(name)
    if (fused === null) return new Uint8Array(codedTensor(variant, name, elements(name)).buffer)
    const [, of, parts] = fused as unknown as [string, string, string]
    return Buffer.concat(
      Array
        .from(
          { length: EXPERTS },
          (_, e) => parts.split('_').map(part => bytes(variant, `${of}.${e}.${part}_proj.weight`))
        )
        .flat()
    )
  }
  const announce: World['announce'] = (names, fields) => ({
    names,
    dtypes: names.map(() => 'bfloat16'),
    shapes: names.map(name => table.tensors.get(name)!.shape),
    group_name: 'weight_transfer',
    ...fields
  })
  const send: World['send'] = async (variant, names, isBucket = false) => {
    const parts = names.map(name => bytes(variant, name))
    for (const part of isBucket ? [Buffer.concat(parts)] : parts) await trainer.broadcast(part)
  }
  return {
    server,
    trainer,
    table,
    bytesOf: names => names.reduce((sum, name) => sum + 2 * elements(name), 0),
    dataOf: bytes,
    announce,
    send,
    update: async (variant, names, fields = {}) => {
      const [reply] = await Promise.all([
        server.post(UPDATE, announce(names, fields)),
        send(variant, names, fields.load_format === 'flattened_bucket')
      ])
      return reply
    }
  }
}

async function join (t: Test, server: CudaServer, tp: number): Promise<NcclTrainer> {
  const trainer = await NcclTrainer.start(t, { size: 1 + tp, loop })
  const [reply] = await Promise.all([
    server.post('/init_weight_transfer_engine', { init_info: trainer.init() }),
    trainer.join()
  ])
  if (reply.status !== 200) throw new Error(JSON.stringify(reply.body))
  return trainer
}

const BUCKET = { load_format: 'flattened_bucket' }

for (
  const [architecture, overrides, experts, bucketGoesInPlace] of [
    ['LlamaForCausalLM', {}, 'fused', true],
    // Biases lie between the rows of one parameter.
    ['Qwen2ForCausalLM', {}, 'fused', false],
    ['Qwen3ForCausalLM', WIDE, 'fused', true],
    // The rows that pad the vocabulary to a multiple of 64 lie behind the embedding.
    ['Qwen3ForCausalLM', { ...WIDE, vocab_size: 321 }, 'fused', false],
    ['Qwen3MoeForCausalLM', WIDE, 'fused', true],
    // Gate and up of all experts are one parameter, and down of all experts is another.
    ['Qwen3MoeForCausalLM', WIDE, 'each', false]
  ] as const
) {
  t.test(
    `${architecture} ${JSON.stringify(overrides)}, experts ${experts}: broadcasts as a bucket, ` +
      'as two buckets and one by one leave the sent weights',
    async t => {
      const config = tinyConfig(architecture, overrides)
      const { server, table, bytesOf, update } = await world(t, config)
      const names = stateDict(architecture, config.num_hidden_layers as number, experts)
      const bytes = bytesOf(names)
      const whole = { status: 200, body: { torn_count: 0, report: { source: 'distributed', bytes, missing_count: 0 } } }
      const bucket = await update(1, names, BUCKET)
      t.match(bucket, whole)
      t.equal(bucket.body.report.bytes_in_place, bucketGoesInPlace ? bytes : 0)
      await checkVariant(t, server, table, 1)
      const each = await update(2, names)
      t.match(each, whole)
      t.equal(each.body.report.bytes_in_place, bytes, 'one by one, each has its place')
      await checkVariant(t, server, table, 2)
      const half = names.length >> 1
      for (const part of [names.slice(half), names.slice(0, half)]) {
        const { status, body } = await update(1, part, BUCKET)
        t.equal(status, 200)
        if (bucketGoesInPlace) t.equal(body.report.bytes_in_place, bytesOf(part))
      }
      await checkVariant(t, server, table, 1)
      t.equal(await server.metric('group_received_bytes_total'), 3 * bytes)
      t.equal(await server.metric('group_dropped_bytes_total'), 0)
    }
  )
}

t.test('tensors in another order, type or split than in memory are staged', async t => {
  const config = tinyConfig('LlamaForCausalLM')
  const names = stateDict('LlamaForCausalLM', 2)
  const { server, trainer, table, bytesOf, announce, update } = await world(t, config)
  const turned = [...names.slice(0, 3), names[4]!, names[3]!, ...names.slice(5)]
  t.match(await update(1, turned, BUCKET), {
    status: 200,
    body: { report: { bytes: bytesOf(names), bytes_in_place: 0 } }
  })
  await checkVariant(t, server, table, 1)
  t.match(await update(2, turned), { status: 200, body: { report: { bytes_in_place: bytesOf(names) } } })
  await checkVariant(t, server, table, 2)
  // float32 of a bfloat16 value: its bits, then 16 zeros.
  const list = ['model.norm.weight', 'model.layers.0.self_attn.q_proj.weight']
  const wide = list.map(name => Uint32Array.from(codedTensor(1, name, bytesOf([name]) / 2), bits => bits << 16 >>> 0))
  const post = server.post(UPDATE, announce(list, { dtypes: ['float32', 'float32'] }))
  for (const { buffer } of wide) await trainer.broadcast(new Uint8Array(buffer))
  t.match(await post, { status: 200, body: { report: { bytes_in_place: 0, bytes: 2 * bytesOf(list) } } })
  await update(1, names.filter(name => !list.includes(name)))
  await checkVariant(t, server, table, 1)

  const two = await world(t, config, 2)
  for (const [variant, fields] of [[1, BUCKET], [2, {}]] as const) {
    t.match(await two.update(variant, names, fields), { status: 200, body: { report: { bytes_in_place: 0 } } })
    await checkVariant(t, two.server, two.table, variant)
  }
  const norms = names.filter(name => name.includes('norm'))
  t.match(
    await two.update(3, norms),
    { status: 200, body: { report: { bytes_in_place: bytesOf(norms) } } },
    'both ranks have all of them'
  )
  t.match(await two.update(3, names.filter(name => !norms.includes(name))), { status: 200 })
  await checkVariant(t, two.server, two.table, 3)
})

t.test('staged and direct pieces in one update leave the sent weights', async t => {
  const config = tinyConfig('Qwen3MoeForCausalLM', WIDE)
  // Pieces of the size of the largest tensor.
  const { server, table, bytesOf, update } = await world(t, config, 2, { bucketBytes: 40_960 })
  const names = stateDict('Qwen3MoeForCausalLM', 3, 'each')
  // On two ranks only norms and routers are unsharded. Between tensors that take a piece each, they form one piece.
  const whole = names.filter(name => /norm|mlp\.gate\.weight/.test(name))
  const [first, ...rest] = names.filter(name => !whole.includes(name)) as [string, ...string[]]
  const order = [...rest.slice(0, -1), first, ...whole, rest.at(-1)!]
  for (const variant of [1, 2, 1]) {
    const { status, body } = await update(variant, order)
    t.equal(status, 200)
    t.equal(body.report.bytes_in_place, bytesOf(whole))
    await checkVariant(t, server, table, variant)
  }
  const one = await world(t, config, 1, { bucketBytes: 40_960 })
  const extra = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  const lists = {
    names: [...names, extra],
    dtypes: [...names.map(() => 'bfloat16'), 'bfloat16'],
    shapes: [...names.map(name => one.table.tensors.get(name)!.shape), [20_000]]
  }
  const post = one.server.post(UPDATE, one.announce(names, lists))
  await one.send(2, names)
  await one.trainer.broadcast(new Uint8Array(40_000))
  const { status, body } = await post
  t.equal(status, 200)
  t.same(body.report.ignored, [extra])
  t.equal(body.report.bytes_in_place, bytesOf(names), 'a tensor that no rank needs is a piece of its own, and staged')
  await checkVariant(t, one.server, one.table, 2)
})

/** An update to variant 2 whose trainer ends after this many tensors. */
async function brokenOff (
  { server, trainer, announce, send }: World,
  names: readonly string[],
  count: number,
  fields = {}
): Promise<Reply> {
  const last = async (): Promise<string> =>
    (await server.engine.checksums()).tensors.find(({ name }) => name === names[count - 1])!.checksum
  const before = await last()
  const post = server.post(UPDATE, announce(names, fields))
  await send(2, names.slice(0, count))
  await eventually(last, now => now !== before)
  await trainer.end()
  return await post
}

t.test('a write that breaks off tears and names its tensors, and the next update heals them', async t => {
  const config = tinyConfig('Qwen3ForCausalLM', WIDE)
  const names = stateDict('Qwen3ForCausalLM', 2)
  const w = await world(t, config)
  t.match(await w.update(1, names, { weight_version: 'one' }), { status: 200 })
  // All tensors form one piece, of which a part has arrived.
  const { status, body } = await brokenOff(w, names, 5, { weight_version: 'two' })
  t.equal(status, 500)
  t.match(body, {
    error: {
      code: 'WEIGHTS_TORN',
      message: joinRegex(
        /process group "weight_transfer".*receiving "model\.embed_tokens\.weight" to/,
        / "lm_head\.weight".*Torn: .*Repeat the update/
      )
    }
  })
  const { weights } = w.server.engine
  if (weights.state !== 'torn') return t.fail('nothing is torn')
  t.same(weights.tensors, [...names].sort())
  t.equal(w.server.engine.weightVersion, 'one')
  t.match(await w.server.post('/generate', { input_ids: [1, 2], sampling_params: { max_new_tokens: 1 } }), {
    status: 503
  })
  const trainer = await join(t, w.server, 1)
  const [healed] = await Promise.all([
    w.server.post(UPDATE, w.announce(names, { ...BUCKET, weight_version: 'two' })),
    trainer.broadcast(Buffer.concat(names.map(name => w.dataOf(2, name))))
  ])
  t.match(healed, { status: 200, body: { torn_count: 0, report: { bytes_in_place: w.bytesOf(names) } } })
  await checkVariant(t, w.server, w.table, 2)
  t.match(await w.server.post('/generate', { input_ids: [1, 2], sampling_params: { max_new_tokens: 1 } }), {
    status: 200
  })
})

t.test('after a broken update of several pieces, those that had arrived are new', async t => {
  const names = stateDict('LlamaForCausalLM', 2)
  const w = await world(t, tinyConfig('LlamaForCausalLM'), 1, { bucketBytes: 41_000 })
  t.match(await w.update(1, names), { status: 200 })
  t.match(await brokenOff(w, names, 2), { status: 500, body: { error: { code: 'WEIGHTS_TORN' } } })
  const { weights } = w.server.engine
  if (weights.state !== 'torn') return t.fail('nothing is torn')
  t.same(weights.tensors, names.slice(1).sort(), 'all except the first, which arrived whole')
})

t.test('with everything staged, an update that breaks off changes nothing', async t => {
  const names = stateDict('Qwen3ForCausalLM', 2)
  const w = await world(t, tinyConfig('Qwen3ForCausalLM', WIDE), 1, { stagedBroadcasts: true })
  for (const [variant, fields] of [[1, BUCKET], [2, {}]] as const) {
    t.match(await w.update(variant, names, fields), {
      status: 200,
      body: { report: { bytes: w.bytesOf(names), bytes_in_place: 0 } }
    })
    await checkVariant(t, w.server, w.table, variant)
  }
  const post = w.server.post(UPDATE, w.announce(names))
  await w.send(1, names.slice(0, 5))
  await w.trainer.end()
  t.match(await post, { status: 502, body: { error: { code: 'GROUP_BROKEN' } } })
  t.equal(w.server.engine.weights.state, 'current')
  await checkVariant(t, w.server, w.table, 2)
})

t.test('refused tensors, and tensors for released weights, are received and dropped', async t => {
  const names = stateDict('LlamaForCausalLM', 2)
  const w = await world(t, tinyConfig('LlamaForCausalLM'))
  t.match(await w.update(1, names), { status: 200 })
  const odd = [...names.slice(0, -1), 'nobody']
  const shapes = names.map(name => w.table.tensors.get(name)!.shape)
  const [refused] = await Promise.all([
    w.server.post(UPDATE, w.announce(names, { names: odd, shapes })),
    w.send(2, names)
  ])
  t.match(refused, {
    status: 400,
    body: { error: { message: /nobody.*received and dropped, and the group stays in step/ } }
  })
  await checkVariant(t, w.server, w.table, 1)
  await w.server.ok('/release_memory_occupation', { tags: ['weights'] })
  const [asleep] = await Promise.all([w.server.post(UPDATE, w.announce(names, BUCKET)), w.send(2, names, true)])
  t.match(asleep, {
    status: 409,
    body: { error: { code: 'CONFLICT', message: /received and dropped, and the group stays in step/ } }
  })
  await w.server.ok('/resume_memory_occupation', { tags: ['weights'] })
  t.match(await w.update(2, names, BUCKET), {
    status: 200,
    body: { torn_count: 0, report: { bytes_in_place: w.bytesOf(names) } }
  })
  await checkVariant(t, w.server, w.table, 2)
})

t.test('a second set of weights takes broadcasts, staged or straight, while a request runs', async t => {
  const names = stateDict('Qwen3ForCausalLM', 2)
  for (const [tp, fields] of [[1, {}], [1, BUCKET], [2, {}]] as const) {
    const w = await world(t, tinyConfig('Qwen3ForCausalLM', WIDE), tp, {}, { shadowWeights: true })
    const stop = new AbortController()
    const generated = (async () => {
      while (!stop.signal.aborted) {
        const body = { input_ids: [1, 2], sampling_params: { max_new_tokens: 64, ignore_eos: true } }
        t.match(await w.server.post('/generate', body), { status: 200 })
      }
    })()
    for (const variant of [1, 2, 1, 3]) {
      const { status, body } = await w.update(variant, names, { ...fields, swap: 'demand', flush_cache: false })
      t.match({ status, body }, { status: 200, body: { torn_count: 0, report: { ms: { swap: Number } } } })
      if (tp === 1) t.equal(body.report.bytes_in_place, w.bytesOf(names))
      await checkVariant(t, w.server, w.table, variant)
    }
    stop.abort()
    await generated
    // The first update connects and allocates between two steps; none holds the gate while bytes come.
    t.strictSame(w.server.engine.weightSets?.live, 0, 'four swaps')
    const half = names.slice(0, names.length >> 1)
    t.match(await w.update(2, half, { ...fields, swap: 'demand' }), { status: 200 })
    t.match(await w.update(2, names.slice(names.length >> 1), { ...fields, swap: 'demand' }), { status: 200 })
    await checkVariant(t, w.server, w.table, 2)
  }
})

t.test('a broadcast into a second set that breaks off changes nothing', async t => {
  const names = stateDict('Qwen3ForCausalLM', 2)
  for (const count of [0, 1, 5]) {
    const w = await world(t, tinyConfig('Qwen3ForCausalLM', WIDE), 1, {}, { shadowWeights: true })
    t.match(await w.update(1, names, { weight_version: 'one' }), { status: 200 })
    const post = w.server.post(UPDATE, w.announce(names, { weight_version: 'two' }))
    await w.send(2, names.slice(0, count))
    await w.trainer.end()
    t.match(await post, { status: 502, body: { error: { code: 'GROUP_BROKEN' } } })
    t.match(w.server.engine, { weights: { state: 'current' }, weightVersion: 'one' })
    await checkVariant(t, w.server, w.table, 1)
  }
})
