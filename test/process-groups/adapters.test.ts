import { createHash } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
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

t.test("AReaL's pair of requests loads an adapter, and drops the name before it", async t => {
  const server = await groupServer(t, { enableLora: true })
  const trainer = await server.joined()
  const load = async (version: number, change: (tensors: SentTensor[]) => SentTensor[] = all => all) => {
    const { tensors: all, config } = await adapterOf(t.testdir(), version, true)
    const tensors = change(all)
    const meta = trainer.update(tensors, {
      lora_name: `p-v${version}`,
      lora_int_id: 1,
      lora_target_modules: config.target_modules,
      lora_rank: config.r,
      lora_alpha: config.lora_alpha,
      lora_bias: 'none',
      base_model_name: 'adder'
    })
    const announced = await server.post('/areal_set_update_weight_meta_lora', meta)
    t.match(announced, { status: 200, body: { success: true } })
    const sent = trainer.send(tensors)
    const reply = await server.post('/areal_update_weights_lora_xccl', meta)
    await sent
    return reply
  }
  const names = async (): Promise<string[]> =>
    (await (await fetch(`${server.url}/adapters`)).json() as any).adapters.map(({ name }: { name: string }) => name)
  t.match(await load(1), { status: 200, body: { success: true } })
  t.match(await load(2), { status: 200 })
  t.same(await names(), ['p-v2'])
  t.match(await load(3, tensors => tensors.slice(0, 2)), {
    status: 400,
    body: { message: /modules were not sent.*pipeline-parallel/ }
  })
  t.same(await names(), ['p-v2'], 'the version before the part stays')
})
