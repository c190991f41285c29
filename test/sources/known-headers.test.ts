import t from 'tap'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { KnownHeaders } from '../../src/sources/disk/known-headers.ts'
import type { Header, HeaderTensors } from '../../src/sources/disk/known-headers.ts'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'
import type { AnnouncedTensor } from '../../src/contract/weight-source.ts'

type Shapes = Record<string, number[]>

/** Every element has this value. */
function file (shapes: Shapes, value: number): Buffer {
  return encodeSafetensors(
    Object.entries(shapes).map(([name, shape]) => ({
      name,
      dtype: 'F16',
      shape,
      data: Buffer.alloc(2 * shape.reduce((a, b) => a * b), value)
    }))
  )
}

async function tensors (folder: string, known: KnownHeaders): Promise<readonly AnnouncedTensor[]> {
  const source = await openDiskSource(folder, { roots: [folder], known })
  await source.close()
  return source.tensors
}

t.test('equal headers give the same list, whatever their data are', async t => {
  const folder = t.testdir()
  const known = new KnownHeaders()
  const write = (value: number): void => {
    writeFileSync(join(folder, 'model-00001-of-00002.safetensors'), file({ a: [3, 5], b: [7] }, value))
    writeFileSync(join(folder, 'model-00002-of-00002.safetensors'), file({ c: [2, 2] }, value + 1))
  }
  write(1)
  const first = await tensors(folder, known)
  write(2)
  t.equal(await tensors(folder, known), first)
  t.same(await tensors(folder, new KnownHeaders()), first)
})

t.test('a change of any part of a header is seen', async t => {
  const known = new KnownHeaders()
  const shapes = { a: [3, 5], b: [15] }
  const changes: Shapes[] = [
    { a: [5, 3], b: [15] },
    { a: [3, 5], c: [15] },
    { b: [15], a: [3, 5] },
    { a: [3, 5], b: [3, 5] },
    { a: [3, 5], b: [16] }
  ]
  for (const changed of changes) {
    for (const each of [shapes, changed, shapes]) {
      const folder = t.testdir({ 'model.safetensors': file(each, 1) })
      t.same(await tensors(folder, known), await tensors(folder, new KnownHeaders()), JSON.stringify(each))
    }
  }
})

t.test('a file that is too short or too long for a known header is refused', async t => {
  const known = new KnownHeaders()
  const whole = file({ a: [3, 5] }, 1)
  await tensors(t.testdir({ 'model.safetensors': whole }), known)
  for (const bytes of [whole.subarray(0, -1), Buffer.concat([whole, Buffer.alloc(1)])]) {
    const folder = t.testdir({ 'model.safetensors': bytes })
    await t.rejects(openDiskSource(folder, { roots: [folder], known }), { code: 'CHECKPOINT_FORMAT' })
  }
})

t.test('a tensor that moves to another file of equal headers stays where its bytes are', async t => {
  const known = new KnownHeaders()
  const parts = [file({ a: [4] }, 1), file({ b: [4] }, 2)]
  for (const order of [[0, 1], [1, 0], [0, 1]]) {
    const folder = t.testdir({
      'model-00001-of-00002.safetensors': parts[order[0]!]!,
      'model-00002-of-00002.safetensors': parts[order[1]!]!
    })
    const found = await tensors(folder, known)
    t.same(found.map(({ name, source }) => [name, source]), order.map((part, source) => ['ab'[part], source]))
  }
})

function header (size: number, fill: string): [Header] {
  return [{ json: Buffer.alloc(size, fill), fileBytes: 1 }]
}

const found: HeaderTensors = { tensors: [], owners: new Map() }

t.test('the oldest headers are dropped when all take more than 8 MiB', async t => {
  const known = new KnownHeaders()
  const third = (8 << 20) / 3 | 0
  const kept = (): string => [...'abcde'].filter(fill => known.find(header(third, fill)) !== undefined).join('')
  for (const fill of 'abc') known.keep(header(third, fill), found)
  t.ok(known.find(header(third, 'a')))
  known.keep(header(third, 'd'), found)
  t.equal(kept(), 'acd', 'b was used longest ago')
  known.keep(header(9 << 20, 'e'), found)
  t.equal(known.find(header(9 << 20, 'e')), undefined, 'one that is larger alone is not kept')
  t.equal(kept(), 'acd')
})

t.test('the headers of 32 checkpoints are kept, however small they are', async t => {
  const known = new KnownHeaders()
  for (let size = 1; size <= 40; size++) known.keep(header(size, 'a'), found)
  const kept = Array.from({ length: 40 }, (_, i) => i + 1).filter(size => known.find(header(size, 'a')) !== undefined)
  t.same(kept, Array.from({ length: 32 }, (_, i) => i + 9))
})
