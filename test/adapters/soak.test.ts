import { readdirSync } from 'node:fs'
import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { setTimeout } from 'node:timers/promises'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import t from 'tap'
import { readArchitecture } from '../../src/model/read-config.ts'
import { peftTensors, testAdapter } from '../helpers/adapters.ts'
import { saveAdapter } from '../helpers/fakes/saved-adapter.ts'
import { engineServer, modelFolder } from '../helpers/gateway.ts'
import { call } from '../helpers/route-app.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'

// Memory over many loads and unloads, by every transport of one process. `npm run soak` runs 1,000 rounds.

const ROUNDS = Number(process.env.REFIT_SOAK ?? 50)
const WARM_UP = Math.ceil(ROUNDS / 5)
/** Rank 128 of all linear layers of the model takes 1.9 MB in a slot and 3.7 MB as float32 tensors. */
const RANK = 128
/** Objects and buffers that JavaScript holds after a collection. */
const MOST_HELD_MB = 8
/** Freed memory stays with the process for a while, so a short run only shows leaks of every round. */
const MOST_MB = ROUNDS < 500 ? 100 : 32
/** Names that are loaded at a time: two slots, so others wait in host memory. */
const KEPT = 4
const REFERENCES = 1_000_000

setFlagsFromString('--expose-gc')
const collect = runInNewContext('gc') as () => void

t.test(`memory, descriptors and slots stay flat over ${ROUNDS} loads and unloads of adapters`, async t => {
  const folder = modelFolder(t)
  const model = join(folder, 'adder-base')
  const { url, engine } = await engineServer(t, folder, {
    enableLora: true,
    tp: 2,
    lora: { maxLoras: 2, maxLoraRank: RANK, maxCpuLoras: KEPT + 1 }
  })
  const path = await saveAdapter(model, join(folder, 'policy'), 1, { rank: RANK })
  const files = await Promise.all(['adapter_config.json', 'adapter_model.safetensors'].map(async name => ({
    name,
    bytes: new Blob([await readFile(join(path, name))])
  })))
  const adapter = testAdapter(await readArchitecture(model), {
    rank: RANK,
    variant: 2,
    only: module => !/embed_tokens|lm_head/.test(module)
  })
  const memories = peftTensors(adapter).map(({ name, shape, data }) => ({
    name,
    shape,
    dtype: 'float32',
    memory: sharedMemory(t, data, REFERENCES)
  }))
  const entry = tensorEntry(memories)

  const form = (): FormData => {
    const form = new FormData()
    for (const { name, bytes } of files) form.append('file', bytes, name)
    return form
  }
  const ok = async (reply: Promise<{ status: number, text: string }>): Promise<void> => {
    const { status, text } = await reply
    if (status !== 200) throw new Error(`${status}: ${text}`)
  }
  const upload = async (name: string, body: FormData): Promise<void> =>
    await ok(call(`${url}/adapters/${name}`, undefined, { method: 'POST', body }))
  const loads: ReadonlyArray<(name: string) => Promise<void>> = [
    async name => await ok(call(`${url}/load_lora_adapter`, { lora_name: name, lora_path: path })),
    async name => await upload(name, form()),
    async name =>
      await ok(call(`${url}/load_lora_adapter_from_tensors`, {
        lora_name: name,
        config_dict: adapter.config,
        serialized_named_tensors: [entry]
      })),
    // Read from its slot, and loaded under another name.
    async name => {
      await ok(call(`${url}/load_lora_adapter`, { lora_name: name, lora_path: path }))
      await upload(name, await (await fetch(`${url}/adapter_files/${name}`)).formData())
    }
  ]
  const unload = async (name: string): Promise<void> =>
    await ok(call(`${url}/adapters/${name}?in_use=wait`, undefined, { method: 'DELETE' }))
  const generate = async (name: string): Promise<void> =>
    await ok(call(`${url}/generate`, {
      input_ids: [5, 6],
      sampling_params: { max_new_tokens: 1 },
      lora_path: name
    }))

  let next = 0
  /** Leaves nothing loaded. Each adapter leaves its slot for the following ones and comes back for a request. */
  const rounds = async (count: number): Promise<void> => {
    const held: string[] = []
    for (const end = next + count; next < end; next++) {
      const name = `p-v${next}`
      await loads[next % loads.length]!(name)
      held.push(name)
      await Promise.all([generate(name), generate(held[0]!)])
      if (held.length === KEPT) await unload(held.shift()!)
    }
    for (const name of held) await unload(name)
  }
  const state = async (): Promise<{ held: number, rss: number, fds: number, threads: number }> => {
    for (let i = 0; i < 3; i++) {
      collect()
      await setTimeout(20)
    }
    const { rss, heapUsed, external } = process.memoryUsage()
    return {
      held: (heapUsed + external) / 1e6,
      rss: rss / 1e6,
      fds: readdirSync('/proc/self/fd').length,
      threads: readdirSync('/proc/self/task').length
    }
  }

  await rounds(WARM_UP)
  const before = await state()
  await rounds(ROUNDS - WARM_UP)
  const after = await state()
  const more = (of: 'held' | 'rss'): string => `${before[of].toFixed(1)} MB before, ${after[of].toFixed(1)} MB after`
  t.comment(`${ROUNDS} rounds: held ${more('held')}; resident ${more('rss')}`)
  t.ok(after.held - before.held < MOST_HELD_MB, more('held'))
  t.ok(after.rss - before.rss < MOST_MB, more('rss'))
  t.equal(after.threads, before.threads)
  // Connections of the client come and go.
  t.ok(after.fds <= before.fds + 2, `${before.fds} descriptors before, ${after.fds} after`)
  t.same(engine.adapters!.list(), [])
  const { text } = await call(`${url}/metrics`)
  t.match(text, /^sglang:lora_pool_slots_used(\{[^}]*\})? 0$/m)
  const counts = new Set(memories.map(({ memory }) => memory.count()))
  t.equal(counts.size, 1, 'every tensor was given back as often')
  t.ok([...counts][0]! <= REFERENCES)
})
