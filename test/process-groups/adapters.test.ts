import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { packageRoot } from '../../src/root.ts'
import { saveAdapter } from '../helpers/fakes/saved-adapter.ts'
import { groupServer } from '../helpers/group-server.ts'
import type { SentTensor } from '../helpers/group-trainer.ts'
import { layout } from '../helpers/uploads.ts'

/** The tensors of an adapter of the adder's base, and its configuration. */
async function adapterOf (folder: string, variant: number, inMemory = false) {
  await saveAdapter(join(packageRoot, 'models', 'adder-base'), folder, variant)
  const file = readFileSync(join(folder, 'adapter_model.safetensors'))
  const tensors = layout(file).tensors.map(({ name, shape, begin, end }): SentTensor => ({
    name: inMemory ? name.replace('.weight', '.default.weight') : name,
    dtype: 'float32',
    shape,
    data: file.subarray(begin, end)
  }))
  return { tensors, config: JSON.parse(readFileSync(join(folder, 'adapter_config.json'), 'utf8')) }
}

t.test('an adapter is broadcast, replaced while generation is paused, and refused in step', async t => {
  const server = await groupServer(t, { enableLora: true, tp: 2 })
  const trainer = await server.joined()
  const load = async (variant: number, fields: object, inMemory = false) => {
    const { tensors, config } = await adapterOf(t.testdir(), variant, inMemory)
    const sent = trainer.send(tensors)
    const body = trainer.update(tensors, { lora_name: 'p', config_dict: config, ...fields })
    const reply = await server.post('/load_lora_adapter_from_distributed', body)
    await sent
    return reply
  }
  const first = await load(1, {})
  t.equal(first.status, 200, JSON.stringify(first.body))
  t.match(first.body, {
    success: true,
    loaded_adapters: { p: '__tensor__' },
    adapter: { version: 1, missing_count: 0 }
  })
  const again = await load(2, {})
  t.match(again, { status: 400, body: { error_message: /already loaded.*received and dropped/ } })
  t.equal((await server.post('/pause_generation', { mode: 'in_place' })).status, 200)
  const replaced = await load(2, { upsert: true }, true)
  t.match(replaced, { status: 200, body: { adapter: { version: 2, replaced: 1 } } })
  t.not(replaced.body.adapter.digest, first.body.adapter.digest)
  t.equal((await server.post('/continue_generation')).status, 200)
  t.match(await load(3, { upsert: true, config_dict: { r: 999 } }), {
    status: 400,
    body: { error_message: /^LoRA adapter "p": / }
  })
  t.match(await load(3, { upsert: true, expected_checksums: { a: 'b' } }), {
    status: 400,
    body: { error_message: /^LoRA adapter "p": expected_checksums names tensors that were not sent: "a"/ }
  })
  t.equal((await load(1, { upsert: true })).body.adapter.digest, first.body.adapter.digest, 'the group stays in step')
  const { updates } = await (await fetch(`${server.url}/updates`)).json() as { updates: any[] }
  const [{ stall_ms: stall, ms, ...update }] = updates
  t.match(update, { kind: 'adapter', adapter: 'p', outcome: 'done' })
  t.ok(stall > 0 && stall <= ms.scatter, `the gate was shut for ${stall} of ${ms.scatter} ms`)
})

type Sums = Record<string, string>

t.test('broadcasts with expected checksums are compared with what all ranks hold', async t => {
  for (const [dtype, held] of [['float32', 'float32'], ['bfloat16', 'bfloat16'], ['bfloat16', 'float32']] as const) {
    const server = await groupServer(t, { enableLora: true, tp: 2, dtype: held })
    const trainer = await server.joined()
    const load = async (variant: number, change: (sums: Sums) => Sums = sums => sums, as: string = dtype) => {
      const { tensors: all, config } = await adapterOf(t.testdir(), variant)
      const tensors = as === 'float32' ? all : all.map(toBfloat16)
      const sums = Object.fromEntries(
        tensors.map(({ name, data }) => [name, createHash('sha256').update(data).digest('hex')] as const)
      )
      const sent = trainer.send(tensors)
      const body = trainer.update(tensors, {
        lora_name: 'p',
        config_dict: config,
        upsert: true,
        expected_checksums: change(sums)
      })
      const reply = await server.post('/load_lora_adapter_from_distributed', body)
      await sent
      return reply
    }
    for (const version of [1, 2]) {
      t.match(await load(version), { status: 200, body: { checksums_verified: true, adapter: { version } } })
    }
    const refused = async (reply: ReturnType<typeof load>, message: RegExp): Promise<void> => {
      const { status, body } = await reply
      t.equal(status, 400)
      t.match(body.error_message, message)
      const { adapters } = await (await fetch(`${server.url}/adapters`)).json() as { adapters: unknown }
      t.match(adapters, [{ name: 'p', version: 2 }], 'the version before stays')
    }
    const wrong = '0'.repeat(64)
    await refused(
      load(3, sums => ({ ...sums, [Object.keys(sums).at(-1)!]: wrong })),
      /expected_checksums is 0{64}, and the bytes have [0-9a-f]{64}: .*Nothing has changed/
    )
    await refused(load(3, sums => ({ ...sums, more: wrong })), /names tensors that were not sent: "more"/)
    await refused(load(3, sums => ({ [Object.keys(sums)[0]!]: wrong })), /lacks tensors that were sent: /)
    if (held === 'bfloat16') {
      await refused(load(3, undefined, 'float32'), /cannot be checked: it is sent as float32.*holds bfloat16/)
    }
    const upper = (sums: Sums): Sums =>
      Object.fromEntries(Object.entries(sums).map(([name, sum]) => [name, sum.toUpperCase()]))
    t.match(await load(3, upper), { status: 200, body: { checksums_verified: true, adapter: { replaced: 2 } } })
  }
})

/** Cut, not rounded: the values only have to differ. */
function toBfloat16 ({ name, shape, data }: SentTensor): SentTensor {
  const floats = new Uint32Array(Uint8Array.from(data).buffer)
  return { name, shape, dtype: 'bfloat16', data: Buffer.from(Uint16Array.from(floats, bits => bits >>> 16).buffer) }
}

/** AReaL's trainer with a group for each pipeline stage. */
async function arealServer (t: Test) {
  // Small enough for several pieces.
  const server = await groupServer(t, { enableLora: true, bucketBytes: 20_000 })
  const stages = [await server.joined({ name: 'stage-0' }), await server.joined({ name: 'stage-1' })]
  const get = async (path: string): Promise<any> => await (await fetch(server.url + path)).json()
  return {
    server,
    /** A trainer of a stage that begins again. */
    restart: async (stage: 0 | 1) => {
      await server.post('/destroy_weights_update_group', { group_name: `stage-${stage}` })
      stages[stage] = await server.joined({ name: `stage-${stage}` })
    },
    adapter: async (version: number) => await adapterOf(t.testdir(), version, true),
    /** Announces tensors of a version, and sends them through a stage's group. */
    send: async (version: number, tensors: readonly SentTensor[], config: any, stage: 0 | 1 = 0, fields = {}) => {
      const meta = stages[stage]!.update(tensors, {
        lora_name: `p-v${version}`,
        lora_int_id: 1,
        lora_target_modules: config.target_modules,
        lora_rank: config.r,
        lora_alpha: config.lora_alpha,
        lora_bias: 'none',
        base_model_name: 'adder',
        ...fields
      })
      const announced = await server.post('/areal_set_update_weight_meta_lora', meta)
      t.match(announced, { status: 200, body: { success: true } })
      const sent = stages[stage]!.send(tensors)
      const reply = await server.post('/areal_update_weights_lora_xccl', meta)
      await sent
      return reply
    },
    /** The digest of the same tensors, loaded by one request. */
    digestOf: async (tensors: readonly SentTensor[], config: object): Promise<string> => {
      const sent = stages[0]!.send(tensors)
      const body = stages[0]!.update(tensors, { lora_name: 'whole', config_dict: config, upsert: true })
      const reply = await server.post('/load_lora_adapter_from_distributed', body)
      await sent
      await server.post('/unload_lora_adapter', { lora_name: 'whole' })
      return reply.body.adapter.digest
    },
    names: async (): Promise<string[]> => (await get('/adapters')).adapters.map(({ name }: { name: string }) => name),
    updates: async (): Promise<any[]> => (await get('/updates')).updates
  }
}

t.test("AReaL's pair of requests loads an adapter, also in parts, and drops the name before it", async t => {
  const { adapter, send, digestOf, names } = await arealServer(t)
  const digests = new Set<string>()
  for (const version of [1, 2]) {
    const { tensors, config } = await adapter(version)
    const { status, body } = await send(version, tensors, config)
    t.equal(status, 200, JSON.stringify(body))
    t.match(body, { success: true, adapter: { name: `p-v${version}`, path: '__tensor__', missing_count: 0 } })
    t.equal(body.unloaded_adapter, version === 1 ? undefined : 'p-v1')
    t.same(await names(), [`p-v${version}`])
    digests.add(body.adapter.digest)
  }
  for (const version of [3, 4]) {
    const { tensors, config } = await adapter(version)
    const whole = await digestOf(tensors, config)
    // Each stage has some layers, and a bucket may end between the halves of a module.
    const parts = [tensors.slice(0, 5), tensors.slice(5, 11), tensors.slice(11)]
    for (const [index, part] of parts.entries()) {
      const { status, body } = await send(version, part, config, index === 1 ? 1 : 0)
      t.equal(status, 200, JSON.stringify(body))
      const before = `p-v${version - 1}`
      if (index === 2) {
        t.match(body, { unloaded_adapter: before, adapter: { digest: whole, missing_count: 0, path: '__tensor__' } })
      } else {
        t.match(body.message, /^a part of a LoRA adapter has come, and \d+ modules are still to come, such as model\./)
        t.same(await names(), [before], 'the version before stays')
      }
    }
    t.same(await names(), [`p-v${version}`])
    digests.add(whole)
  }
  t.equal(digests.size, 4)
})

t.test('parts are replaced by themselves, and dropped with a refused part or for another version', async t => {
  const { adapter, send, digestOf, names, updates } = await arealServer(t)
  const { tensors, config } = await adapter(1)
  const other = await adapter(2)
  const [first, rest] = [tensors.slice(0, 4), tensors.slice(4)]
  const isPart = async (reply: ReturnType<typeof send>): Promise<void> => {
    const { status, body } = await reply
    t.match([status, body.message], [200, /are still to come/])
  }
  // The part of another try has other values.
  await isPart(send(1, other.tensors.slice(0, 4), config))
  await isPart(send(1, first, config))
  const whole = await digestOf(tensors, config)
  t.equal((await send(1, rest, config, 1)).body.adapter.digest, whole)

  await isPart(send(2, first, config))
  const wrong = rest.map((tensor, index) => index === 1 ? { ...tensor, name: 'nobody.lora_A.weight' } : tensor)
  t.match(await send(2, wrong, config, 1), {
    status: 400,
    body: {
      message: /^LoRA adapter "p-v2": .*"nobody\.lora_A\.weight".*received and dropped, and the group stays in step/
    }
  })
  t.match(await updates(), [{ adapter: 'p-v2', outcome: 'refused', error: { code: 'ADAPTER_REFUSED' } }])
  await isPart(send(2, rest, config, 1))
  t.same(await names(), ['p-v1'], 'the first part went with the refused one')
  await isPart(send(3, first, config))
  await isPart(send(2, rest, config, 1))
  await isPart(send(2, first, config, 0, { lora_alpha: config.lora_alpha + 1 }))
  t.same(await names(), ['p-v1'], 'parts of other versions and other scales are no parts of it')
  t.equal((await send(2, rest, config, 1, { lora_alpha: config.lora_alpha + 1 })).status, 200)
  t.same(await names(), ['p-v2'])
  t.match((await updates()).filter(({ adapter }) => adapter === 'p-v3'), [{
    outcome: 'refused',
    error: { code: 'WEIGHTS_INCOMPLETE', message: /modules of LoRA adapter "p-v3" have not come, among them model\./ }
  }])
  t.match(await send(3, [], config), { status: 400, body: { message: /the adapter has no tensors/ } })
})

t.test('a part from before the restart of its trainer is no part of the adapter that the new one sends', async t => {
  const { adapter, restart, send, digestOf, names } = await arealServer(t)
  const { tensors, config } = await adapter(1)
  const other = await adapter(2)
  const [first, rest] = [tensors.slice(0, 4), tensors.slice(4)]
  for (const stage of [1, 0] as const) {
    const version = 5 + stage
    t.match((await send(version, other.tensors.slice(4), config, stage)).body.message, /are still to come/)
    await restart(stage)
    t.match((await send(version, first, config)).body.message, /are still to come/, 'stage 1 has died')
    t.notOk((await names()).includes(`p-v${version}`))
    const whole = await digestOf(tensors, config)
    t.equal((await send(version, rest, config, 1)).body.adapter?.digest, whole)
    t.same(await names(), [`p-v${version}`])
  }
})
