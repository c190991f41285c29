import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { createEngine } from '../../../src/app/create-engine.ts'
import { createServer } from '../../../src/app/server.ts'
import { packageRoot } from '../../../src/root.ts'
import { tensorsOf } from '../../helpers/transaction-server.ts'

const BASE = join(packageRoot, 'models/adder-base')
const TRAINED = join(packageRoot, 'models/adder')
const BYTES = 'application/octet-stream'
const UPDATE = '/update_weights_from_shards'

interface Reply {
  status: number
  json: any
}

async function serve (t: Test) {
  const engine = await createEngine(BASE, { threads: 1, maxTotalTokens: 1024, tp: 2 })
  const app = await createServer({ engine, uploadTimeoutMs: 1500, closeGraceMs: 500, logger: false })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    await app.close()
    await engine.close()
  })
  const call = async (path: string, body?: unknown, init: RequestInit = {}): Promise<Reply> => {
    const reply = await fetch(url + path, {
      method: 'POST',
      body: JSON.stringify(body),
      headers: { 'content-type': 'application/json' },
      ...init
    })
    return { status: reply.status, json: await reply.json() }
  }
  return { engine, call, part: partSender(call) }
}

function partSender (call: (path: string, body?: unknown, init?: RequestInit) => Promise<Reply>) {
  return async (plan: string, source: number, chunk: number, bytes: Uint8Array, type = BYTES): Promise<Reply> =>
    await call(`/shard_plans/${plan}/parts/${source}?chunk=${chunk}`, undefined, {
      body: bytes as never,
      headers: { 'content-type': type }
    })
}

/** Two ranks, of which each has half of the rows of every tensor. */
function announcement (folder: string) {
  const tensors = tensorsOf(folder)
  const layout = {
    mesh: { shape: [2], ranks: [0, 1] },
    placements: [{ shard: 0 }]
  }
  return {
    format: 'refit.shards/1',
    world: 2,
    layouts: [layout],
    tensors: tensors.map(({ name, shape }) => ({ name, shape, dtype: 'bfloat16', layout: 0 })),
    chunk_bytes: 1 << 17
  }
}

/** The bytes of a rank's parts, packed as the plan's columns say. */
function partsOf (folder: string, rank: number, sends: any): Map<number, Buffer> {
  const shards = tensorsOf(folder).map(({ shape, data }) => {
    const rows = Math.ceil(shape[0]! / 2)
    const width = data.length / shape[0]!
    return Buffer.from(data.subarray(rank * rows * width, Math.min(data.length, (rank + 1) * rows * width)))
  })
  const parts = new Map<number, Buffer>()
  const { blocks, pieces } = sends
  for (const [index, chunk] of blocks.chunk.entries()) {
    parts.set(chunk, Buffer.alloc(blocks.offset[index] + blocks.bytes[index]))
  }
  for (const [index, chunk] of pieces.chunk.entries()) {
    for (let row = 0; row < pieces.rows[index]; row++) {
      const from = 2 * (pieces.at[index] + row * pieces.pitch[index])
      const to = pieces.offset[index] + 2 * row * pieces.cols[index]
      shards[pieces.tensor[index]]!.copy(parts.get(chunk)!, to, from, from + 2 * pieces.cols[index])
    }
  }
  return parts
}

t.test('two ranks upload their halves of a model, twice, and the engine holds what it would have loaded', async t => {
  const { engine, call, part } = await serve(t)
  const plan = (await call('/shard_plans', announcement(BASE))).json
  t.match(plan, { success: true, world: 2, ranks: 2, missing: [], ignored: [] })
  t.ok(plan.chunks > 2)
  t.equal(plan.bytes.out.length, 2)
  t.equal((await call('/shard_plans', announcement(BASE))).json.id, plan.id, 'the same announcement: the same plan')
  for (const [version, folder] of [['1', TRAINED], ['2', BASE]] as const) {
    const running = call(UPDATE, { plan: plan.id, digest: plan.digest, upload: true, weight_version: version })
    await Promise.all([0, 1].map(async rank => {
      const sends = (await call(`/shard_plans/${plan.id}/sources/${rank}`, undefined, { method: 'GET', body: null }))
        .json
      for (const [chunk, bytes] of partsOf(folder, rank, sends)) {
        t.match(await part(plan.id, rank, chunk, bytes), { status: 200, json: { success: true } })
      }
    }))
    t.match(await running, { status: 200, json: { success: true, torn_count: 0, report: { source: 'shards' } } })
    t.equal(engine.weightVersion, version)
    const fresh = await createEngine(folder, { threads: 1, maxTotalTokens: 1024, tp: 2 })
    t.same(await engine.checksums(), await fresh.checksums())
    await fresh.close()
  }
  t.match(await call(`/shard_plans/${plan.id}`, undefined, { method: 'DELETE', body: null, headers: {} }), {
    status: 200
  })
  t.match(await call(UPDATE, { plan: plan.id, upload: true }), { status: 409, json: { error: { code: 'PLAN_STALE' } } })
})

t.test('parts that do not come, or are others than the plan has, are named, and the old weights stay', async t => {
  const { engine, call, part } = await serve(t)
  const plan = (await call('/shard_plans', announcement(BASE))).json
  const before = await engine.checksums()
  const sends = (await call(`/shard_plans/${plan.id}/sources/0`, undefined, { method: 'GET', body: null })).json
  const own = partsOf(TRAINED, 0, sends).get(0)!
  t.match(await part('unknown', 0, 0, own), { status: 409, json: { error: { code: 'PLAN_STALE' } } })
  t.match(await part(plan.id, 0, 0, own.subarray(1)), {
    status: 400,
    json: { error: { message: new RegExp(`expected a body of ${own.length} bytes`) } }
  })
  t.match(await part(plan.id, 0, 99_999, own), { status: 400, json: { error: { message: /has nothing to send/ } } })
  t.equal((await part(plan.id, 0, 0, own, 'application/json')).status, 400)
  t.match(await part(plan.id, 0, 0, own), { status: 504, json: { error: { message: /no update of shard plan/ } } })
  const running = call(UPDATE, { plan: plan.id, upload: true })
  const sent = part(plan.id, 0, 0, own)
  t.match(await call(UPDATE, { plan: plan.id, upload: true, weight_version: 'other' }), {
    status: 409,
    json: { error: { code: 'CONFLICT' } }
  })
  t.match(await running, { status: 504, json: { error: { code: 'DEADLINE', message: /rank 1 \(\d+ bytes\)/ } } })
  t.match(await sent, { status: 504 })
  t.same(await engine.checksums(), before)
  t.equal(engine.weights.state, 'current')
})

t.test('requests that fit no plan are refused with the field at fault', async t => {
  const { call } = await serve(t)
  const whole = announcement(BASE)
  const refused = async (change: object, code: string, message: RegExp): Promise<void> => {
    t.match(await call('/shard_plans', { ...whole, ...change }), { status: 400, json: { error: { code, message } } })
  }
  await refused({ format: 'refit.shards/2' }, 'INVALID_REQUEST', /format/)
  await refused({ world: 0 }, 'INVALID_REQUEST', /world/)
  await refused({ tensors: [{ ...whole.tensors[0], dtype: 'int3' }] }, 'INVALID_REQUEST', /dtype "int3"/)
  await refused({ layouts: [{ mesh: { shape: [3], ranks: [0, 1] }, placements: ['replicate'] }] }, 'SHARD_LAYOUT', /3/)
  await refused(
    { layouts: [{ mesh: { shape: [1], ranks: [0] }, placements: ['partial'] }] },
    'INVALID_REQUEST',
    /layouts/
  )
  await refused({ tensors: whole.tensors.slice(1) }, 'SHARDS_INCOMPLETE', /not announced/)
  const { id, digest } = (await call('/shard_plans', whole)).json
  for (
    const [body, code, message] of [
      [{ plan: id }, 'INVALID_REQUEST', /expected one of handles, kept, group_name, upload, got none/],
      [{ plan: id, upload: true, group_name: 'x' }, 'INVALID_REQUEST', /group_name and upload/],
      [{ plan: id, handles: ['x'] }, 'INVALID_REQUEST', /has 2 ranks, each with a text of its own; got 1/],
      [{ plan: id, digest: `${digest}0`, upload: true }, 'PLAN_STALE', /announce the shards again/],
      [{ plan: id, group_name: 'nobody' }, 'NOT_FOUND', /no process group/],
      [{ plan: id, kept: { name: 'nothing', generation: 1 } }, 'NOT_FOUND', /nothing is kept/]
    ] as const
  ) t.match((await call(UPDATE, body)).json, { error: { code, message } })
})
