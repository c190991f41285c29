import { readdirSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { setTimeout } from 'node:timers/promises'
import { createEngine, createServer } from '../src/index.ts'
import { checkPython, median } from './lib/baseline.ts'
import { freePort, glooPeer } from './lib/gloo-peer.ts'
import type { GlooPeer } from './lib/gloo-peer.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'
import type { Figure } from './lib/table.ts'

// Weights broadcast by a torch process over gloo on loopback, POST to 200, against a torch receiver (which receives the
// bytes and does not copy them into a model), in turns; an update without tensors; and the time to join a group whose
// trainer waits. usage: node dist/bench/distributed.js

const rivals = checkPython()
const THREADS = Number(process.env.REFIT_THREADS ?? 2)
const ROUNDS = 9
const next = randomModel(2)
const engine = await createEngine(randomModel(1), {
  threads: THREADS,
  maxTotalTokens: 4096,
  modelRoots: [dirname(next)]
})
const app = await createServer({ engine, tokenizer: null, logger: false })
const url = await app.listen({ port: 0, host: '127.0.0.1' })
const checkpoint = join(next, readdirSync(next).find(name => name.endsWith('.safetensors'))!)
const trainer = await glooPeer(checkpoint, 1)
const receiver = await glooPeer(checkpoint, 1)

async function post (path: string, body: object): Promise<{ ms: number, reply: unknown }> {
  const start = performance.now()
  const reply = await fetch(url + path, {
    method: 'POST',
    body: JSON.stringify(body),
    headers: { 'content-type': 'application/json' }
  })
  const text = await reply.text()
  if (!reply.ok) throw new Error(`${path}: ${text}`)
  return { ms: performance.now() - start, reply: JSON.parse(text) }
}

/** The trainer waits in its store when the request is sent. Milliseconds of the engine's reply. */
async function joinEngine (group: string): Promise<number> {
  const port = await freePort()
  const waiting = trainer.ask({ do: 'join', group, port, rank: 0, world: 2 })
  await setTimeout(300)
  const place = {
    master_address: '127.0.0.1',
    master_port: port,
    rank_offset: 1,
    world_size: 2,
    group_name: group,
    backend: 'gloo'
  }
  const { ms } = await post('/init_weights_update_group', place)
  await waiting
  return ms
}

async function joinTorch (group: string): Promise<void> {
  const port = await freePort()
  await Promise.all(
    [trainer, receiver].map(async (peer, rank) => await peer.ask({ do: 'join', group, port, rank, world: 2 }))
  )
}

const names = trainer.tensors.map(({ name }) => name)
const bytes = trainer.tensors.reduce((sum, { shape }) => sum + 2 * shape.reduce((a, b) => a * b, 1), 0)
const announced = {
  names,
  dtypes: names.map(() => 'bfloat16'),
  shapes: trainer.tensors.map(({ shape }) => shape),
  flush_cache: false
}

async function ours (way: string): Promise<number> {
  const body = { ...announced, group_name: 'ours', ...way === 'bucket' ? { load_format: 'flattened_bucket' } : {} }
  const [{ ms }] = await Promise.all([
    post('/update_weights_from_distributed', body),
    trainer.ask({ do: 'broadcast', group: 'ours', way })
  ])
  return ms
}

async function theirs (way: string): Promise<number> {
  const start = performance.now()
  await Promise.all(
    [trainer, receiver].map(async (peer: GlooPeer) => await peer.ask({ do: 'broadcast', group: 'theirs', way }))
  )
  return performance.now() - start
}

const figures: Figure[] = []
await joinEngine('ours')
await joinTorch('theirs')
for (const [way, title] of [['bucket', 'one flattened bucket'], ['each', `${names.length} broadcasts`]] as const) {
  const taken: { ours: number[], theirs: number[] } = { ours: [], theirs: [] }
  for (let round = 0; round <= ROUNDS; round++) {
    const [mine, torch] = [await ours(way), await theirs(way)]
    if (round === 0) continue
    taken.ours.push(mine)
    taken.theirs.push(torch)
  }
  const [mine, torch] = [median(taken.ours), median(taken.theirs)]
  figures.push({
    figure: `${(bytes / 1e9).toFixed(2)} GB over gloo on loopback, ${title}, POST to 200`,
    ours: `${mine.toFixed(0)} ms, ${(bytes / mine / 1e6).toFixed(2)} GB/s`,
    other: `${torch.toFixed(0)} ms, ${
      (bytes / torch / 1e6).toFixed(2)
    } GB/s, torch to torch, not written into a model; medians of ${ROUNDS} in turns`,
    ratio: torch / mine,
    goal: 0.85
  })
}

const got = await engine.checksums()
await (await fetch(`${url}/update_weights_from_disk`, {
  method: 'POST',
  body: JSON.stringify({ model_path: next }),
  headers: { 'content-type': 'application/json' }
}))
  .text()
const wanted = await engine.checksums()
if (JSON.stringify(got) !== JSON.stringify(wanted)) {
  throw new Error('what was broadcast is not what the checkpoint holds')
}

const empty: number[] = []
const health: number[] = []
for (let round = 0; round < 600; round++) {
  const { ms } = await post('/update_weights_from_distributed', {
    names: [],
    dtypes: [],
    shapes: [],
    group_name: 'ours',
    flush_cache: false
  })
  const start = performance.now()
  await (await fetch(`${url}/health`)).text()
  if (round < 100) continue
  empty.push(ms)
  health.push(performance.now() - start)
}
figures.push({
  figure: 'an update without tensors, POST to 200',
  ours: `${median(empty).toFixed(2)} ms`,
  other: `1 ms; GET /health by the same client ${median(health).toFixed(2)} ms; medians of ${empty.length} in turns`,
  ratio: 1 / median(empty),
  goal: 1
})

const inits: number[] = []
while (inits.length < 9) {
  const group = `init-${inits.length}`
  inits.push(await joinEngine(group))
  await Promise.all([post('/destroy_weights_update_group', { group_name: group }), trainer.ask({ do: 'leave', group })])
}
figures.push({
  figure: 'to join a group whose trainer is there, POST to 200',
  ours: `${median(inits).toFixed(1)} ms (${Math.min(...inits).toFixed(1)} to ${Math.max(...inits).toFixed(1)})`,
  other: '50 ms',
  ratio: 50 / median(inits),
  goal: 1
})

trainer.end()
receiver.end()
await app.close()
await engine.close()
report('distributed', figures, rivals)
