import { readdirSync } from 'node:fs'
import assert from 'node:assert/strict'
import fc from 'fast-check'
import t from 'tap'
import { Staging } from '../../src/sources/upload/upload-staging.ts'
import { Upload } from '../../src/sources/upload/upload.ts'
import type { UploadFile } from '../../src/sources/upload/upload-file.ts'
import type { StreamedSource, WeightSource } from '../../src/contract/weight-source.ts'

const MEMORY = 4 << 20
// A piece of a stream has 128 KB: the file has several, and its data begins at an odd offset.
const COUNT = 300_001
const data = Buffer.from(Uint8Array.from({ length: 2 * COUNT }, (_, i) => Math.imul(i, 2654435761) >>> 24))
const json = Buffer.from(`{"a":{"dtype":"BF16","shape":[${COUNT}],"data_offsets":[0,${2 * COUNT}]}}`.padEnd(81))
const length = Buffer.alloc(8)
length.writeBigUInt64LE(BigInt(json.length))
const file = Buffer.concat([length, json, data])

function open (folder: string, stream: boolean, staging = new Staging(MEMORY)): { upload: Upload, staging: Staging } {
  return { upload: new Upload({ staging, folder, isStream: () => stream, maxBytes: 1e9, stallMs: 60_000 }), staging }
}

async function feed (to: UploadFile, bytes: Buffer, cuts: readonly number[]): Promise<void> {
  const ends = [...new Set(cuts)].sort((a, b) => a - b).concat(bytes.length)
  let at = 0
  for (const end of ends) {
    // A chunk may not be read once it has been consumed.
    const chunk = Buffer.from(bytes.subarray(at, end))
    await to.take(chunk)
    chunk.fill(0)
    at = end
  }
  await to.end()
}

async function bytesOf (source: WeightSource): Promise<Buffer> {
  if (source.kind === 'streamed') return await drain(source)
  assert.ok(source.kind === 'stored')
  const [{ buffer }] = source.sources as [{ buffer: Uint8Array }]
  return Buffer.from(buffer)
}

/** All pieces joined, as a writer reads them: each piece is overwritten after it. */
async function drain (source: StreamedSource): Promise<Buffer> {
  const out = Buffer.alloc(data.length)
  let end = 0
  for (let last: Uint8Array | undefined;;) {
    last?.fill(0)
    const piece = await source.stream.next()
    if (piece === undefined) break
    assert.ok(end === 0 ? piece.begin === 0 : piece.begin <= end - 3, `a piece at ${piece.begin} behind ${end}`)
    const { buffer } = piece.source as { buffer: Uint8Array }
    assert.equal(buffer.length, piece.length)
    out.set(buffer, piece.begin)
    end = piece.begin + piece.length
    last = buffer.subarray(0, -8)
    await new Promise(setImmediate)
  }
  assert.equal(end, data.length)
  return out
}

const cutsIn = fc.array(fc.integer({ min: 1, max: file.length - 1 }), { maxLength: 30 })

t.test('bytes that arrive in any chunks are buffered, spooled or streamed unchanged', async t => {
  const folder = t.testdir({})
  const { staging } = open(folder, false)
  await fc.assert(
    fc.asyncProperty(cutsIn, fc.constantFrom('memory', 'disk', 'stream'), async (cuts, way) => {
      // Half of the memory is in use, so the body is spooled to disk.
      const taken = way === 'disk' ? staging.take(MEMORY * 0.7) : undefined
      const { upload } = open(folder, way === 'stream', staging)
      const to = upload.begin('file', cuts.length % 2 === 0 ? file.length : null)
      if (way === 'stream') {
        const [, bytes] = await Promise.all([
          feed(to, file, cuts).then(async () => await upload.finish()),
          upload.opened.then(bytesOf)
        ])
        assert.ok(bytes.equals(data))
      } else {
        await feed(to, file, cuts)
        const source = await upload.finish()
        assert.equal(upload.place, way)
        assert.ok((await bytesOf(source)).equals(data))
        assert.deepEqual(source.tensors, [{ name: 'a', dtype: 'bfloat16', shape: [COUNT], source: 0, offset: 0 }])
        await source.close()
      }
      await upload.close()
      if (taken !== undefined) staging.give(taken)
      assert.equal(staging.bytes.live, 0)
      assert.deepEqual(readdirSync(folder), [])
    }),
    { numRuns: 60 }
  )
  staging.close()
  t.same(staging.bytes, { live: 0, kept: 0 })
})

t.test('a write that breaks off gives back the memory of every piece, also of the one that it writes', async t => {
  for (const read of [0, 1, 2]) {
    const { upload, staging } = open(t.testdir({}), true)
    const to = upload.begin('file', null)
    const fed = feed(to, file, []).catch((error: unknown) => error)
    const source = await upload.opened
    for (let i = 0; i < read; i++) await (source as StreamedSource).stream.next()
    t.ok(staging.bytes.live > 0)
    await source.close()
    await upload.close()
    await fed
    t.equal(staging.bytes.live, 0, `after ${read} pieces`)
    staging.close()
  }
})

t.test('the last piece of a stream is written once the end is valid, and none before there are two', async t => {
  const { upload, staging } = open(t.testdir({}), true)
  const to = upload.begin('file', null)
  let ready = false
  const bodyEnd = 8 + json.length + staging.pieceBytes
  await to.take(file.subarray(0, bodyEnd))
  const source = await upload.opened
  assert.ok(source.kind === 'streamed')
  const { stream } = source
  void stream.ready().then(() => {
    ready = true
  })
  await new Promise(setImmediate)
  t.notOk(ready, 'a full piece, and nothing behind it')
  await to.take(file.subarray(bodyEnd, bodyEnd + 1))
  await new Promise(setImmediate)
  t.ok(ready)
  t.equal((await stream!.next())!.length, staging.pieceBytes)
  await to.take(file.subarray(bodyEnd + 1, bodyEnd + 100))
  upload.fail(new Error('gone'))
  await t.rejects(stream!.next(), { message: 'gone' })
  await upload.close()
  t.equal(staging.bytes.live, 0)
})

t.test('staging memory is bounded in sum, kept for the next upload, and freed', async t => {
  const staging = new Staging(1 << 20, 20)
  const one = staging.take(100_000)
  t.equal(one.length, 128 << 10)
  t.equal(staging.tryHold(700_000), undefined, 'a body leaves a quarter to others')
  const rest = staging.take(700_000)
  t.throws(() => staging.take(400_000), { code: 'NO_MEMORY', message: /other uploads use the staging memory/ })
  staging.give(one)
  t.equal(staging.take(90_000), one)
  staging.give(one)
  staging.give(rest)
  t.same(staging.bytes, { live: 0, kept: (128 << 10) + rest.length })
  const large = staging.take(1 << 20)
  t.same(staging.bytes, { live: 1 << 20, kept: 0 }, 'kept memory is freed for it')
  t.equal(one.length, 0, 'and its memory is gone at once')
  staging.give(large)
  await new Promise(resolve => setTimeout(resolve, 60))
  t.same(staging.bytes, { live: 0, kept: 0 })
})

t.test('staging memory of an odd size splits no element, and an invalid size is refused', t => {
  const staging = new Staging((1 << 20) + 77)
  for (const bytes of [staging.holdBytes, staging.pieceBytes, staging.slotBytes]) {
    t.ok(Number.isSafeInteger(bytes) && bytes > 0, `${bytes}`)
  }
  for (const limit of [0, -1, 1000, 1e6 + 0.5, NaN, Infinity]) {
    t.throws(() => new Staging(limit), { name: 'RangeError', message: /a whole number of bytes/ })
  }
  t.end()
})

t.test('a header with more tensors than a call has arguments is read', async t => {
  const { upload } = open(t.testdir({}), false, new Staging(64 << 20))
  const tensor = '{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}'
  const header = Buffer.from(`{${Array.from({ length: 200_000 }, (_, i) => `"t${i}":${tensor}`).join(',')}}`)
  const prefix = Buffer.alloc(8)
  prefix.writeBigUInt64LE(BigInt(header.length))
  await feed(upload.begin('many', null), Buffer.concat([prefix, header]), [])
  const source = await upload.finish()
  assert.ok(source.kind === 'stored')
  t.equal(source.tensors.length, 200_000)
  t.equal(source.tensors[199_999]!.name, 't199999')
  await source.close()
})
