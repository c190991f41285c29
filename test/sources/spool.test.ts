import assert from 'node:assert/strict'
import { mkdtempSync, readdirSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import fc from 'fast-check'
import t from 'tap'
import { allocatePages, freeChunk, freeMemory, PAGE_BYTES } from '../../src/native/host-memory.ts'
import { native } from '../../src/native/load-addon.ts'
import { SpoolFile } from '../../src/sources/upload/spool-file.ts'
import { Staging } from '../../src/sources/upload/upload-staging.ts'
import { Upload } from '../../src/sources/upload/upload.ts'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'

const folder = mkdtempSync(join(tmpdir(), 'refit-spool-test-'))
t.teardown(() => {
  rmSync(folder, { recursive: true })
})

/** Byte i of file f. */
const byte = (f: number, i: number): number => Math.imul(i + 1, 2654435761 + 2 * f) >>> 24

t.test('buffered and spooled files are read back as one range with each tensor at its announced place', async t => {
  const MEMORY = 1 << 20
  const staging = new Staging(MEMORY)
  // Some end in the middle of a page, an element of float32 or a slot; some are empty.
  const size = fc.oneof(
    fc.integer({ min: 0, max: 3 }),
    fc.integer({ min: 4, max: 40_000 }),
    fc.integer({ min: 100_000, max: 300_000 }),
    fc.constantFrom(PAGE_BYTES / 2, staging.slotBytes / 2, 10 * staging.slotBytes)
  )
  let disk = 0
  await fc.assert(
    fc.asyncProperty(
      fc.array(size, { minLength: 1, maxLength: 5 }),
      fc.integer({ min: 1, max: 70_000 }),
      async (sizes, chunk) => {
        const upload = new Upload({
          staging,
          folder,
          isStream: () => false,
          maxBytes: 1e9,
          stallMs: 60_000
        })
        const bodies = sizes.map((elements, f) =>
          Buffer.from(Uint8Array.from({ length: 2 * elements }, (_, i) => byte(f, i)))
        )
        for (const [f, data] of bodies.entries()) {
          const half = data.length >> 2 << 1
          const bytes = encodeSafetensors([{
            name: `${f}a`,
            dtype: 'BF16',
            shape: [half / 2],
            data: data.subarray(0, half)
          }, { name: `${f}b`, dtype: 'BF16', shape: [(data.length - half) / 2], data: data.subarray(half) }])
          const file = upload.begin(`${f}`, null)
          for (let at = 0; at < bytes.length; at += chunk) {
            const part = Buffer.from(bytes.subarray(at, at + chunk))
            await file.take(part)
            part.fill(0)
          }
          await file.end()
        }
        const source = await upload.finish()
        const whole = Buffer.alloc(bodies.reduce((sum, { length }) => sum + length, 0))
        let end = 0
        if (source.kind === 'stored') assert.equal(upload.place, 'memory')
        else {
          assert.ok(source.kind === 'streamed')
          disk++
          await source.stream.ready()
          for (let piece = await source.stream.next(); piece !== undefined; piece = await source.stream.next()) {
            const { buffer } = piece.source as { buffer: Uint8Array }
            const borders = bodies.map((_, f) => bodies.slice(0, f).reduce((sum, { length }) => sum + length, 0))
            assert.ok(
              piece.begin <= Math.max(0, end - 3) || (piece.begin === end && borders.includes(end)),
              `a piece at ${piece.begin} behind ${end}`
            )
            assert.ok(
              whole.subarray(piece.begin, end).equals(buffer.subarray(0, end - piece.begin)),
              'it begins with the previous bytes'
            )
            whole.set(buffer, piece.begin)
            end = piece.begin + piece.length
          }
          assert.equal(end, whole.length)
        }
        for (const { name, shape, source: index, offset } of source.tensors) {
          const data = bodies[parseInt(name)]!
          const half = data.length >> 2 << 1
          const from = source.kind === 'stored'
            ? Buffer.from((source.sources[index] as { buffer: Uint8Array }).buffer)
            : whole
          assert.ok(
            from.subarray(offset, offset + 2 * shape[0]!).equals(
              name.endsWith('a')
                ? data.subarray(0, half)
                : data.subarray(half)
            ),
            name
          )
        }
        await source.close()
        assert.equal(staging.bytes.live, 0)
        assert.deepEqual(readdirSync(folder), [])
      }
    ),
    { numRuns: 40, examples: [[[10 * staging.slotBytes, 3], 4096], [[40_001, 300_000, 300_000], 777]] }
  )
  t.ok(disk >= 2, `${disk} of them were spooled`)
  staging.close()
})

t.test('an upload that is aborted while it is spooled or read back leaves no file and no memory', async t => {
  const staging = new Staging(1 << 20)
  const data = Buffer.alloc(3 << 20, 7)
  const bytes = encodeSafetensors([{ name: 'a', dtype: 'BF16', shape: [data.length / 2], data }])
  for (const part of [0.1, 0.5, 1]) {
    for (const pieces of part === 1 ? [0, 1, 5] : [0]) {
      const upload = new Upload({ staging, folder, isStream: () => false, maxBytes: 1e9, stallMs: 60_000 })
      const file = upload.begin('a', null)
      await file.take(bytes.subarray(0, bytes.length * part))
      if (part === 1) {
        await file.end()
        const source = await upload.finish()
        assert.ok(source.kind === 'streamed')
        for (let i = 0; i < pieces; i++) await source.stream.next()
      }
      await upload.close()
      t.same([staging.bytes.live, readdirSync(folder).length], [0, 0])
    }
  }
  staging.close()
})

t.test('a file that ends early is reported, and no bytes are invented', async t => {
  const file = await SpoolFile.open(folder)
  const page = allocatePages(PAGE_BYTES).fill(3)
  await file.grow(0, PAGE_BYTES)
  const ways = [await file.write(page, 0), await file.write(page, 0), await file.write(page, 0)]
  for (const way of new Set(ways)) {
    page.fill(0)
    await file.read(page, 0, way)
    t.ok(page.every(value => value === 3), way)
    await t.rejects(file.read(page, PAGE_BYTES, way), { message: 'the spooled upload ends at byte 4096' })
  }
  await file.close()
  await t.rejects(SpoolFile.open(join(folder, 'nowhere')), { code: 'SPOOL_FAILED', message: /ENOENT.*--upload-folder/ })
  freeMemory(page)
  t.equal(page.length, 0)
})

t.test('the memory of whole chunks is freed at once, that of parts and small chunks never', t => {
  const chunk = Buffer.alloc(64 << 10, 1)
  const part = chunk.subarray(0, 40 << 10)
  freeChunk(part)
  t.equal(part.length, 40 << 10)
  freeChunk(chunk)
  t.same([chunk.length, part.length], [0, 0])
  freeChunk(chunk)
  const small = Buffer.alloc(1000, 1)
  freeChunk(small)
  t.equal(small.length, 1000)
  const shared = Buffer.from(new SharedArrayBuffer(64 << 10))
  freeChunk(shared)
  t.equal(shared.length, 64 << 10)
  for (const bytes of [1, 100, 4096, 70_000, 3 << 20]) {
    const pages = allocatePages(bytes)
    t.same([native().pageOffset(pages), pages.length], [0, bytes])
    freeMemory(pages)
  }
  t.throws(() => {
    native().freeBuffer(Buffer.alloc(1) as never)
  }, { name: 'TypeError', message: /expected an ArrayBuffer/ })
  t.end()
})
