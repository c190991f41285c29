import fc from 'fast-check'
import t from 'tap'
import type { ModelTable } from '../../src/model/architecture.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { bytesOf } from '../../src/native/dtypes.ts'
import { RECT, RECT_FIELDS, TENSOR, TENSOR_FIELDS } from '../../src/native/write-layout.ts'
import { compilePlan } from '../../src/shards/compile-plan.ts'
import type { ShardPlan } from '../../src/shards/compile-plan.ts'
import { messagesOf } from '../../src/shards/messages.ts'
import { chunkJob, messagesJob } from '../../src/shards/plan-jobs.ts'
import { sendsOf } from '../../src/shards/sends.ts'
import { CoveredNames } from '../../src/weights/covered-names.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'
import { announce, boxParam, codesOf, expectedParams, factors, flatParam, meshParam, worlds } from './sharded-model.ts'
import type { Param } from './sharded-model.ts'

const KINDS = ['Qwen3ForCausalLM', 'Qwen3MoeForCausalLM'] as const
const tables = new Map<string, ModelTable>()
const tableOf = (kind: typeof KINDS[number], ranks: number): ModelTable => {
  const key = `${kind} ${ranks}`
  if (!tables.has(key)) tables.set(key, buildModelTable(tinyArchitecture(kind), ranks))
  return tables.get(key)!
}

/** A generator of numbers that fast-check can repeat. */
function generator (seed: number): (below: number) => number {
  let state = seed >>> 0
  return below => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    return Math.floor(state / 2 ** 32 * below)
  }
}

/** Lays every tensor of the model out at random over the ranks of a trainer, q, k and v and gate and up also fused. */
function randomTrainer (table: ModelTable, codes: ReadonlyMap<string, number[]>, world: number, seed: number): Param[] {
  const random = generator(seed)
  const pickOne = <T>(list: readonly T[]): T => list[random(list.length)]!
  const params: Param[] = []
  const done = new Set<string>()
  const lay = (announced: Param['announced'], whole: number[]): void => {
    const dtype = pickOne(['bfloat16', 'float32'] as const)
    const own = { ...announced, dtype }
    const way = random(6)
    if (way < 2) {
      params.push((way === 0 ? boxParam : flatParam)(own, whole, world, random))
      return
    }
    // Pipeline stages and experts: a tensor may lie on some ranks only.
    const ranks = Array.from({ length: world }, (_, rank) => rank).filter(() => way !== 2 || random(2) === 0)
    if (ranks.length === 0) ranks.push(random(world))
    const shape = pickOne(factors(ranks.length))
    const placements = shape.map(() => {
      const kind = random(4)
      const axis = random(own.shape.length)
      return kind === 0 ? null : [axis, kind === 3 ? 1 + random(4) : 1] as [number, number]
    })
    params.push(meshParam(own, whole, { shape, ranks, placements }))
  }
  const fuse = (label: string, parts: Array<{ name: string, rows: number }>): void => {
    const entries = parts.map(({ name }) => table.tensors.get(name)!)
    const { cols, shape } = entries[0]!
    const turns = entries[0]!.rows / parts[0]!.rows
    const whole: number[] = []
    for (let turn = 0; turn < turns; turn++) {
      for (const { name, rows } of parts) {
        whole.push(...codes.get(name)!.slice(turn * rows * cols, (turn + 1) * rows * cols))
      }
    }
    for (const { name } of parts) done.add(name)
    lay({ name: label, shape: [whole.length / cols, ...shape.slice(1)], dtype: 'bfloat16', into: parts }, whole)
  }
  for (const { name, shape, rows, cols, alternative } of table.tensors.values()) {
    if (alternative || done.has(name)) continue
    const of = (other: string): string => name.replace(/q_proj|gate_proj/, other)
    if (name.includes('q_proj') && random(2) === 0) {
      const kv = table.tensors.get(of('k_proj'))!.rows
      const groups = pickOne([1, 2].filter(count => kv % count === 0 && rows % count === 0))
      fuse(`fused ${name}`, [
        { name, rows: rows / groups },
        { name: of('k_proj'), rows: kv / groups },
        { name: of('v_proj'), rows: kv / groups }
      ])
    } else if (name.includes('gate_proj') && random(2) === 0) {
      fuse(`fused ${name}`, [{ name, rows }, { name: of('up_proj'), rows }])
    } else if (name.includes('embed_tokens') && random(2) === 0) {
      const padding = Array.from({ length: random(9) * cols }, () => -1)
      lay({ name, shape: [rows + padding.length / cols, cols], dtype: 'bfloat16', isPadded: true }, [
        ...codes.get(name)!,
        ...padding
      ])
    } else lay({ name, shape, dtype: 'bfloat16' }, codes.get(name)!)
  }
  return params
}

/** Carries out a plan on the trainer's arrays, by its pieces. Fails if an element is written twice. */
function carryOut (plan: ShardPlan, table: ModelTable, params: readonly Param[]): number[][][] {
  const ranks = Array.from(
    { length: table.ranks },
    () => table.params.map(({ rows, cols }) => new Array<number>(rows * cols).fill(Number.NaN))
  )
  const { pieces } = plan
  for (let piece = 0; piece < pieces.length; piece++) {
    const shard = params[pieces.tensor[piece]!]!.shards.get(pieces.source[piece]!)!
    const into = ranks[pieces.rank[piece]!]![pieces.param[piece]!]!
    const width = table.params[pieces.param[piece]!]!.cols
    for (let row = 0; row < pieces.rows[piece]!; row++) {
      for (let col = 0; col < pieces.cols[piece]!; col++) {
        const at = (pieces.dstRow[piece]! + row) * width + pieces.dstCol[piece]! + col
        if (!Number.isNaN(into[at])) throw new Error(`element ${at} of parameter ${pieces.param[piece]} written twice`)
        into[at] = shard[pieces.at[piece]! + row * pieces.pitch[piece]! + col]!
      }
    }
  }
  return ranks
}

const cases = fc.record({
  kind: fc.constantFrom(...KINDS),
  ranks: fc.constantFrom(1, 2, 4),
  world: worlds,
  seed: fc.nat(),
  chunkBytes: fc.constantFrom(1 << 12, 1 << 15, 1 << 24)
})

t.test('random shards of a whole model arrive at their places, each element once', async t => {
  fc.assert(
    fc.property(cases, ({ kind, ranks, world, seed, chunkBytes }) => {
      const table = tableOf(kind, ranks)
      const codes = codesOf(table)
      const params = randomTrainer(table, codes, world, seed)
      const plan = compilePlan(table, new CoveredNames(table), announce(params, world, chunkBytes))
      const got = carryOut(plan, table, params)
      const expected = expectedParams(table, codes)
      for (const [rank, own] of got.entries()) {
        for (const [param, values] of own.entries()) {
          const at = values.findIndex((value, index) => !Object.is(value, expected[rank]![param]![index]))
          if (at >= 0) {
            throw new Error(
              `rank ${rank}, ${table.params[param]!.name}[${at}]: ${values[at]}, not ${expected[rank]![param]![at]}`
            )
          }
        }
      }
      for (const [index, { sizes }] of plan.tensors.entries()) {
        for (const [rank, shard] of params[index]!.shards) {
          if (shard.length !== (sizes.get(rank) ?? 0)) throw new Error(`another size of ${plan.tensors[index]!.name}`)
        }
      }
    }),
    { numRuns: 40 }
  )
})

t.test('chunks hold the same pieces, block by block, within their limit', async t => {
  fc.assert(
    fc.property(cases, ({ kind, ranks, world, seed, chunkBytes }) => {
      const table = tableOf(kind, ranks)
      const params = randomTrainer(table, codesOf(table), world, seed)
      const plan = compilePlan(table, new CoveredNames(table), announce(params, world, chunkBytes))
      const { pieces } = plan
      const out = new Array<number>(world).fill(0)
      let next = 0
      for (const [index, chunk] of plan.chunks.entries()) {
        if (chunk.first !== next) throw new Error('chunks are not one after another')
        // A row is not cut, and a piece is aligned.
        const row = 16 + 4 * Math.max(...table.params.map(({ cols }) => cols))
        if (chunk.bytes > chunkBytes + world * row) throw new Error(`chunk ${index} has ${chunk.bytes} bytes`)
        next = chunk.end
        const { job, owners } = chunkJob(plan, index, { fd: 0 }, 100)
        let at = 0
        for (const block of chunk.blocks) {
          if (block.offset !== at) throw new Error('blocks are not one after another')
          for (let piece = block.first; piece < block.end; piece++) {
            const row = (piece - chunk.first) * TENSOR_FIELDS
            const rect = (piece - chunk.first) * RECT_FIELDS
            if (
              pieces.source[piece] !== block.source || job.rects[rect + RECT.rank] !== block.rank ||
              job.tensors[row + TENSOR.offset] !== 100 + at || owners[piece - chunk.first] !== pieces.target[piece]
            ) throw new Error(`piece ${piece} is in a block of another pair`)
            const bytes = pieces.rows[piece]! * pieces.cols[piece]! *
              bytesOf(plan.tensors[pieces.tensor[piece]!]!.dtype)
            out[block.source]! += bytes
            at += Math.ceil(bytes / 16) * 16
          }
          if (at !== block.offset + block.bytes) throw new Error('a block has another length')
        }
        if (at !== chunk.bytes) throw new Error('a chunk has another length')
      }
      if (next !== pieces.length) throw new Error('pieces are in no chunk')
      if (out.join() !== plan.bytes.out.join()) throw new Error(`bytes out are ${out}, not ${plan.bytes.out}`)
    }),
    { numRuns: 25 }
  )
})

/** The bytes of a chunk that each source packs: an element's code at the place of its first byte. */
function packed (plan: ShardPlan, params: readonly Param[], chunk: number): number[] {
  const { pieces, offsets } = plan
  const { first, end } = plan.chunks[chunk]!
  const memory: number[] = []
  for (let piece = first; piece < end; piece++) {
    const size = bytesOf(plan.tensors[pieces.tensor[piece]!]!.dtype)
    const shard = params[pieces.tensor[piece]!]!.shards.get(pieces.source[piece]!)!
    for (let row = 0; row < pieces.rows[piece]!; row++) {
      for (let col = 0; col < pieces.cols[piece]!; col++) {
        memory[offsets[piece]! + (row * pieces.cols[piece]! + col) * size] = shard[
          pieces.at[piece]! + row * pieces.pitch[piece]! + col
        ]!
      }
    }
  }
  return memory
}

/** Carries out a plan as NCCL does: messages into parameters and slots, then the write of the slots. */
function exchange (
  plan: ShardPlan,
  table: ModelTable,
  params: readonly Param[]
): { ranks: number[][][], direct: number, staged: number } {
  const ranks = Array.from(
    { length: table.ranks },
    () => table.params.map(({ rows, cols }) => new Array<number>(rows * cols).fill(Number.NaN))
  )
  const counts = { direct: 0, staged: 0 }
  for (const [chunk, { messages, room }] of messagesOf(plan).entries()) {
    const memory = packed(plan, params, chunk)
    const slots = Array.from({ length: table.ranks }, () => [] as number[])
    for (const { rank, offset, bytes, param, at } of messages) {
      counts[param < 0 ? 'staged' : 'direct']++
      for (let byte = 0; byte < bytes; byte++) {
        const value = memory[offset + byte]
        if (value === undefined) continue
        if (param < 0) {
          if (slots[rank]![at + byte] !== undefined) throw new Error('two messages at one place of a slot')
          slots[rank]![at + byte] = value
        } else ranks[rank]![param]![(at + byte) / bytesOf(table.params[param]!.dtype)] = value
      }
    }
    if (slots.some(({ length }) => length > room)) throw new Error('a slot is too small')
    const { job: { tensors, rects }, owners } = messagesJob(plan, messages, { fd: 0 })
    for (let index = 0; index < owners.length; index++) {
      const [tensor, rect] = [index * TENSOR_FIELDS, index * RECT_FIELDS]
      const param = rects[rect + RECT.param]!
      for (let row = 0; row < rects[rect + RECT.rows]!; row++) {
        for (let col = 0; col < rects[rect + RECT.cols]!; col++) {
          const from = tensors[tensor + TENSOR.offset]! + row * tensors[tensor + TENSOR.rowBytes]! +
            col * tensors[tensor + TENSOR.colBytes]!
          const to = (rects[rect + RECT.dstRow]! + row) * table.params[param]!.cols + rects[rect + RECT.dstCol]! + col
          ranks[rects[rect + RECT.rank]!]![param]![to] = slots[rects[rect + RECT.rank]!]![from]!
        }
      }
    }
  }
  return { ranks, ...counts }
}

t.test('messages put each element at its place: large stretches straight into parameters, the rest by a slot', t => {
  const counts = { direct: 0, staged: 0 }
  fc.assert(
    fc.property(cases, ({ kind, ranks, world, seed, chunkBytes }) => {
      const table = tableOf(kind, ranks)
      const codes = codesOf(table)
      const params = randomTrainer(table, codes, world, seed)
      const plan = compilePlan(table, new CoveredNames(table), announce(params, world, chunkBytes))
      const got = exchange(plan, table, params)
      counts.direct += got.direct
      counts.staged += got.staged
      const expected = expectedParams(table, codes)
      for (const [rank, own] of got.ranks.entries()) {
        for (const [param, values] of own.entries()) {
          const at = values.findIndex((value, index) => !Object.is(value, expected[rank]![param]![index]))
          if (at >= 0) throw new Error(`rank ${rank}, ${table.params[param]!.name}[${at}]: ${values[at]}`)
        }
      }
      // Both sides have the messages of a pair of ranks in the same order.
      const all = messagesOf(plan)
      for (let source = 0; source < world; source++) {
        const { messages, blocks } = sendsOf(plan, source)
        const own = all.flatMap((chunk, number) =>
          chunk.messages.filter(message => message.source === source).map(message => [number, message] as const)
        )
        t.same(
          [messages.chunk, messages.rank, messages.bytes],
          [own.map(([chunk]) => chunk), own.map(([, { rank }]) => rank), own.map(([, { bytes }]) => bytes)]
        )
        const perChunk = Math.max(0, ...all.map(chunk => chunk.messages.filter(one => one.source === source).length))
        if (perChunk > 2 * 128 + 2 * ranks) throw new Error(`${perChunk} messages of a rank in one chunk`)
        if (messages.chunk.length < blocks.chunk.length) throw new Error('a block is missing')
      }
    }),
    { numRuns: 25 }
  )
  t.ok(counts.direct > 100 && counts.staged > 100, JSON.stringify(counts))
  t.end()
})

t.test('replicas share the work evenly', async t => {
  const table = tableOf('Qwen3ForCausalLM', 2)
  const codes = codesOf(table)
  const params = [...table.tensors.values()].filter(({ alternative }) => !alternative).map(({ name, shape }) =>
    meshParam({ name, shape, dtype: 'bfloat16' }, codes.get(name)!, {
      shape: [2, 2],
      ranks: [0, 1, 2, 3],
      placements: [null, [0, 1]]
    })
  )
  const { bytes } = compilePlan(table, new CoveredNames(table), announce(params, 4, 1 << 24))
  const [least, most] = [Math.min(...bytes.out), Math.max(...bytes.out)]
  t.ok(most - least <= 0.1 * most, `ranks send ${bytes.out} bytes`)
})

t.test('torch cuts strided and uneven shards like this', async t => {
  // Read from torch 2.13: mesh (dp 2, tp 2), [_StridedShard(0, 2), Shard(0)] of 14 rows.
  const rowsOf = (shape: number[], placements: Array<[number, number]>, count: number): number[][] => {
    const whole = Array.from({ length: count }, (_, index) => index)
    const param = meshParam({ name: 'x', shape: [count], dtype: 'float32' }, whole, {
      shape,
      ranks: Array.from({ length: shape.reduce((a, b) => a * b, 1) }, (_, rank) => rank),
      placements
    })
    return [...param.shards.values()]
  }
  t.same(rowsOf([2, 2], [[0, 2], [0, 1]], 14), [[0, 1, 2, 3], [7, 8, 9, 10], [4, 5, 6], [11, 12, 13]])
  t.same(rowsOf([2, 2], [[0, 1], [0, 2]], 8)[0], [0, 2], 'rows 0 and 2, where torch says it is the box of rows 0 and 1')
  t.same(rowsOf([2], [[0, 4]], 14), [[0, 1, 4, 5, 8, 9, 12], [2, 3, 6, 7, 10, 11, 13]])
  t.same(rowsOf([4], [[0, 1]], 10).map(rows => rows.length), [3, 3, 3, 1])
})
