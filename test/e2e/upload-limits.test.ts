import t from 'tap'
import { spawnSync } from 'node:child_process'
import { fstatSync, mkdtempSync, readdirSync, readlinkSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'
import { layout, PATH, post, uploadServer } from '../helpers/uploads.ts'

// Uploads at the limits of memory and disk, over real sockets.

const SMALL = 512 << 10
t.test('twenty simultaneous uploads succeed one after another, each complete', async t => {
  const server = await uploadServer(t, { uploadMemoryBytes: 4 << 20 })
  const sums: unknown[] = []
  const files = [server.file('adder'), server.file('adder-base')]
  for (const file of files) {
    t.equal((await server.send(file)).status, 200)
    sums.push(await server.checksums())
  }
  const replies = await Promise.all(Array.from({ length: 20 }, async (_, i) =>
    await (i % 4 === 3
      ? server.form([['f', files[i % 2]!, 'model.safetensors']], `?weight_version=${i}`)
      : server.send(files[i % 2]!, `?weight_version=${i}${i % 4 === 2 ? '&mode=stream' : ''}`))))
  const places = replies.map(({ status, body }) => status === 200 ? body.upload.staged : `${status} ${body.error.code}`)
  t.ok(places.every(place => ['memory', 'disk', 'stream', '503 NO_MEMORY'].includes(place)), places.join())
  t.ok(places.includes('disk') && places.includes('memory'))
  const index = Number(server.engine.weightVersion)
  t.same(await server.checksums(), sums[index % 2], 'the weights are those of the upload that set the label')
  await server.idle()
  t.equal((await server.generate()).status, 200)
})

const small = mkdtempSync(join(tmpdir(), 'refit-tmpfs-'))
const isMounted = spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=1300k', 'refit-test', small]).status === 0
t.teardown(() => {
  if (isMounted) spawnSync('umount', [small])
  rmSync(small, { recursive: true, force: true })
})
const skip = isMounted ? false : 'no right to mount a small file system here'

t.test('a full disk gives a clear refusal, before the body and in its middle', { skip }, async t => {
  const folder = small
  const server = await uploadServer(t, { uploadMemoryBytes: SMALL, uploadFolder: folder })
  const before = await server.checksums()
  const file = server.file('adder')
  const fill = (bytes: number): void => {
    writeFileSync(join(folder, 'other'), Buffer.alloc(bytes))
  }
  fill(800_000)
  for (const reply of [await server.send(file), await server.form([['f', file, 'x']])]) {
    t.match(reply, {
      status: 507,
      body: {
        error: {
          code: 'SPOOL_FAILED',
          message: /has no room for the upload: \d+ bytes are to come, \d+ are free\. .*Nothing has changed/
        }
      }
    })
  }
  fill(0)
  const { request, reply } = post(server.url + PATH, {
    'content-type': 'application/octet-stream',
    'content-length': file.length
  })
  request.write(file.subarray(0, 300_000))
  // The space for the whole file is checked when the file is extended to its size.
  while (!readdirSync('/proc/self/fd').some(isSpool)) await sleep(1)
  fill(900_000)
  request.end(file.subarray(300_000))
  t.match(await reply, { status: 507, body: { error: { code: 'SPOOL_FAILED', message: /ENOSPC/ } } })
  t.same(await server.checksums(), before)
  rmSync(join(folder, 'other'))
  await server.idle()
  t.equal((await server.send(file)).status, 200)
  const nowhere = await uploadServer(t, { uploadMemoryBytes: SMALL })
  rmSync(nowhere.spool, { recursive: true })
  t.match(await nowhere.send(file), {
    status: 507,
    body: { error: { code: 'SPOOL_FAILED', message: /ENOENT.*--upload-folder/ } }
  })
})

/** True for a descriptor of an upload's file that already has the upload's length. */
function isSpool (fd: string): boolean {
  try {
    return /refit-upload-\d/.test(readlinkSync(`/proc/self/fd/${fd}`)) && fstatSync(Number(fd)).size > 0
  } catch {
    return false
  }
}

t.test('several connections write into one transaction: raw, as a form, and as streams', async t => {
  const server = await uploadServer(t, { uploadMemoryBytes: 4 << 20 })
  const before = await server.checksums()
  const file = server.file('adder')
  t.match(await server.send(file), { status: 200 })
  const wanted = await server.checksums()
  t.match(await server.send(server.file('adder-base')), { status: 200 })
  t.same(await server.checksums(), before)
  const { tensors } = layout(file)
  const part = (from: number, to: number): Buffer =>
    encodeSafetensors(
      tensors.slice(from, to).map(({ name, dtype, shape, begin, end }) => ({
        name,
        dtype,
        shape,
        data: file.subarray(begin, end)
      }))
    )
  const json = async (path: string, body: object): Promise<any> =>
    await (await fetch(server.url + path, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(body)
    }))
      .json()
  const { id } = await json('/weight_transactions', { owner: 'test', expected: 'all' })
  t.type(id, 'string')
  t.match(await server.send(part(0, 5)), { status: 409, body: { error: { code: 'TRANSACTION_OPEN' } } })
  const replies = await Promise.all([
    server.send(part(0, 15), `?transaction=${id}`),
    server.form([['transaction', id], ['f', part(15, 30), 'b']]),
    server.send(part(30, 46), `?transaction=${id}&mode=stream`)
  ])
  t.same(
    replies.map(({ status, body }) => [status, body.report?.transaction ?? JSON.stringify(body)]),
    Array.from({ length: 3 }, () => [200, id])
  )
  t.equal(server.engine.weightVersion, 'default')
  t.match(await json(`/weight_transactions/${id}/commit`, { weight_version: 'whole' }), { state: 'committed' })
  t.equal(server.engine.weightVersion, 'whole')
  t.same(await server.checksums(), wanted)
  await server.idle()
})
