import { execFileSync } from 'node:child_process'
import { closeSync, fstatSync, openSync, readdirSync, readSync, unlinkSync, writeSync } from 'node:fs'
import { join } from 'node:path'
import { Worker } from 'node:worker_threads'
import { createEngine, createServer } from '../src/index.ts'
import { openDiskSource } from '../src/sources/disk/disk.ts'
import { packageRoot } from '../src/root.ts'
import { checkPython, machine, median, python } from './lib/baseline.ts'
import { gpuEntry, emptyBucketEntry, sharedEntry } from './lib/handles.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'
import type { Figure } from './lib/table.ts'

// /update_weights_from_tensor on a CPU: decoding many handles, a whole model out of shared memory, and a bucket without
// tensors. usage: node dist/bench/tensor.js

const rivals = checkPython()
const THREADS = Number(process.env.REFIT_THREADS ?? 2)
const HEADER = 64

report('tensor', [...await decoding(), ...await sharedMemory()], rivals)

/** The tensors of Qwen3-30B-A3B, a handle each: the first large body of a new thread, and later ones. */
async function decoding (): Promise<Figure[]> {
  const layer = (n: number): Array<{ name: string, shape: [number, number] }> => [
    ...['input_layernorm', 'post_attention_layernorm', 'self_attn.q_norm', 'self_attn.k_norm'].map(name => ({
      name: `model.layers.${n}.${name}.weight`,
      shape: [2048, 1] as [number, number]
    })),
    ...['q', 'k', 'v', 'o'].map(name => ({
      name: `model.layers.${n}.self_attn.${name}_proj.weight`,
      shape: [4096, 2048] as [number, number]
    })),
    { name: `model.layers.${n}.mlp.gate.weight`, shape: [128, 2048] },
    ...Array
      .from({ length: 128 }, (_, e) =>
        ['gate', 'up', 'down']
          .map(name => ({
            name: `model.layers.${n}.mlp.experts.${e}.${name}_proj.weight`,
            shape: [768, 2048] as [number, number]
          })))
      .flat()
  ]
  const ends = ['model.embed_tokens.weight', 'model.norm.weight', 'lm_head.weight'].map(name => ({
    name,
    shape: [2048, 1] as [number, number]
  }))
  const tensors = [...Array.from({ length: 48 }, (_, n) => layer(n)).flat(), ...ends]
  const entry = gpuEntry(tensors)
  const first: number[] = []
  const later: number[] = []
  const whole: number[] = []
  const theirs: number[] = []
  while (first.length < 9) {
    const [ms, ...rest] = await decode(entry, true, 6)
    first.push(ms!)
    later.push(...rest)
    whole.push(...(await decode(entry, false, 6)).slice(1))
    theirs.push(
      (JSON.parse(
        execFileSync(python(), [join(packageRoot, 'bench/python/unpickle.py')], { input: entry, encoding: 'utf8' })
      ) as { ms: number })
        .ms
    )
  }
  const row = (which: string, ms: number[]): Figure => ({
    figure: `${tensors.length} handles in one request (${
      (entry.length / 1e6).toFixed(1)
    } MB of base64), decoded: ${which}`,
    ours: `${median(ms).toFixed(1)} ms`,
    other: `40 ms; CPython's C unpickler without any calls ${median(theirs).toFixed(1)} ms; in turns`,
    ratio: 40 / median(ms),
    goal: 1
  })
  return [
    row('first body of a thread', first),
    row('later bodies', later),
    row('later bodies, by the reader that takes every payload', whole)
  ]
}

async function decode (entry: string, lists: boolean, times: number): Promise<number[]> {
  const worker = new Worker(new URL('./lib/decode-worker.js', import.meta.url), {
    resourceLimits: { maxYoungGenerationSizeMb: 192 }
  })
  const ms: number[] = []
  while (ms.length < times) {
    ms.push(
      await new Promise<number>((resolve, reject) => {
        worker.once('message', (message: { ms: number }) => {
          resolve(message.ms)
        })
        worker.once('error', reject)
        worker.postMessage({ entry, lists })
      })
    )
  }
  await worker.terminate()
  return ms
}

async function sharedMemory (): Promise<Figure[]> {
  const model = randomModel(1)
  const engine = await createEngine(model, { threads: THREADS, maxTotalTokens: 4096 })
  const app = await createServer({ engine, tokenizer: null })
  const url = await app.listen({ port: 0 })
  const post = async (entry: string, loadFormat: string | null): Promise<number> => {
    const body = JSON.stringify({ serialized_named_tensors: [entry], load_format: loadFormat, flush_cache: false })
    const start = performance.now()
    const reply = await fetch(`${url}/update_weights_from_tensor`, {
      method: 'POST',
      body,
      headers: { 'content-type': 'application/json' }
    })
    const text = await reply.text()
    if (!reply.ok) throw new Error(text)
    return performance.now() - start
  }
  const name = `/torch_${process.pid}_1_1`
  const path = `/dev/shm${name}`
  try {
    const { bytes, tensors } = await copyToSharedMemory(model, path)
    const entry = sharedEntry(name, bytes, tensors)
    for (let i = 0; i < 3; i++) await post(entry, null)
    const updates: number[] = []
    const fresh: number[] = []
    const kept: number[] = []
    while (updates.length < 10) {
      updates.push(await post(entry, null))
      if (updates.length % 2 === 0) fresh.push(machine('memcpy', THREADS, path).medianGBs)
      else kept.push(machine('mapped', THREADS, path).medianGBs)
    }
    const gbs = bytes / median(updates) / 1e6
    for (let i = 0; i < 100; i++) await post(emptyBucketEntry(), 'flattened_bucket')
    const empty: number[] = []
    const health: number[] = []
    while (empty.length < 500) {
      empty.push(await post(emptyBucketEntry(), 'flattened_bucket'))
      const start = performance.now()
      await (await fetch(`${url}/health`)).text()
      health.push(performance.now() - start)
    }
    return [
      {
        figure: `update of ${(bytes / 1e9).toFixed(2)} GB out of CPU shared memory, POST to 200`,
        ours: `${median(updates).toFixed(0)} ms, ${gbs.toFixed(2)} GB/s`,
        other: `${median(fresh)} GB/s, ${THREADS}-thread memcpy from a mapping of the same file, made for the copy (${
          median(kept)
        } from one that is there already); in turns`,
        ratio: gbs / median(fresh),
        goal: 0.85
      },
      {
        figure: 'an empty bucket, POST to 200',
        ours: `${median(empty).toFixed(2)} ms`,
        other: `1 ms; GET /health by the same client ${
          median(health).toFixed(2)
        } ms; medians of ${empty.length} in turns`,
        ratio: 1 / median(empty),
        goal: 1
      }
    ]
  } finally {
    await app.close()
    await engine.close()
    unlinkSync(path)
  }
}

/**
 * A flat tensor in shared memory as torch writes it: a header whose count is high enough for all updates, then all
 * weights.
 */
async function copyToSharedMemory (
  model: string,
  path: string
): Promise<{ bytes: number, tensors: Array<{ name: string, shape: number[], dtype: string, offset: number }> }> {
  const source = await openDiskSource(model, { roots: [model] })
  const tensors = source.tensors.map(({ name, shape, dtype, offset }) => ({ name, shape, dtype, offset }))
  await source.close()
  const files = readdirSync(model).filter(file => file.endsWith('.safetensors'))
  if (files.length !== 1) throw new Error(`${model} is in ${files.length} files`)
  const from = openSync(join(model, files[0]!), 'r')
  const to = openSync(path, 'wx', 0o600)
  const first = Math.min(...tensors.map(({ offset }) => offset))
  const bytes = fstatSync(from).size - first
  const header = Buffer.alloc(HEADER)
  header.writeInt32LE(1 << 20)
  writeSync(to, header)
  const piece = Buffer.alloc(8 << 20)
  for (let at = first, got = 1; got > 0; at += got) {
    got = readSync(from, piece, 0, piece.length, at)
    writeSync(to, piece, 0, got)
  }
  closeSync(from)
  closeSync(to)
  return { bytes, tensors: tensors.map(tensor => ({ ...tensor, offset: (tensor.offset - first) / 2 })) }
}
