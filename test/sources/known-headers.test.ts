import t from 'tap'
import { writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { KnownHeaders } from '../../src/sources/disk/known-headers.ts'
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

t.test('the oldest headers are dropped when all take more than 8 MiB', async t => {
  const known = new KnownHeaders()
  const header = (size: number, fill: string): Buffer => Buffer.alloc(size, fill)
  const keep = (size: number, fill: string): void => {
    known.keep([{ json: header(size, fill), fileBytes: 1 }], { tensors: [], owners: new Map([[fill, 0]]) })
  }
  const has = (size: number, fill: string): boolean =>
    known.find([{ json: header(size, fill), fileBytes: 1 }]) !== undefined
  const third = (8 << 20) / 3 | 0
  for (const fill of 'abc') keep(third, fill)
  t.ok(has(third, 'a'))
  keep(third, 'd')
  t.same([...'abcd'].map(fill => has(third, fill)), [true, false, true, true], 'b was used longest ago')
  keep(9 << 20, 'e')
  t.notOk(has(9 << 20, 'e'), 'one that is larger alone is not kept')
  t.ok([...'acd'].every(fill => has(third, fill)))
})
