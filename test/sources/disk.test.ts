import { readdirSync, readSync, symlinkSync, writeFileSync } from 'node:fs'
import { join, relative } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { bytesOf } from '../../src/native/dtypes.ts'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import type { StoredSource } from '../../src/contract/weight-source.ts'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'
import { checkpointTensors, positionCoded, writeTensors } from '../helpers/make-checkpoint.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'
import { goldenRoot } from '../helpers/goldens.ts'

const arch = tinyArchitecture('Qwen3ForCausalLM', { num_hidden_layers: 1 })

const tensors = checkpointTensors(arch, { values: positionCoded() })

const INDEX = 'model.safetensors.index.json'

const fds = (): number => readdirSync('/proc/self/fd').length

/** Opens it, and makes sure that the test closes it. */
async function open (t: Test, path: string, root = path): Promise<StoredSource> {
  const source = await openDiskSource(path, { roots: [root] })
  t.teardown(async () => {
    await source.close()
  })
  return source
}

/** The bytes of an announced tensor, read the way that the core does. */
function storedBytes (source: StoredSource, name: string): Buffer {
  const tensor = source.tensors.find(found => found.name === name)!
  const buffer = Buffer.alloc(tensor.shape.reduce((a, b) => a * b, 1) * bytesOf(tensor.dtype))
  readSync((source.sources[tensor.source] as { fd: number }).fd, buffer, 0, buffer.length, tensor.offset)
  return buffer
}

function small (name: string, bytes = 4): Buffer {
  return encodeSafetensors([{ name, dtype: 'BF16', shape: [bytes / 2], data: Buffer.alloc(bytes, 1) }])
}

/** Refused with this message, by each of its ways in, and nothing stays open. */
async function refused (t: Test, path: string, roots: string[], code: string, message: RegExp): Promise<void> {
  const before = fds()
  await t.rejects(openDiskSource(path, { roots }), { name: 'RefitError', code, message })
  t.equal(fds(), before, 'no file stays open')
}

for (const shards of [1, 2, 7]) {
  t.test(`a folder of ${shards} file(s) announces every tensor where its bytes are`, async t => {
    const folder = t.testdir()
    writeTensors(folder, tensors, shards)
    const source = await open(t, folder)
    t.equal(source.transport.name, 'disk')
    t.equal(source.sources.length, shards)
    t.same(source.tensors.map(({ name }) => name).sort(), tensors.map(({ name }) => name).sort())
    for (const { name, data, shape, dtype } of tensors) {
      t.ok(storedBytes(source, name).equals(data), name)
      t.match(source.tensors.find(found => found.name === name), { shape, dtype })
    }
    const places = source.tensors.map(tensor => tensor.source * 1e9 + tensor.offset)
    t.same(places, [...places].sort((a, b) => a - b), 'in the order of their bytes')
    await source.verify()
  })
}

t.test('all three dtypes are read from one file', async t => {
  const folder = t.testdir()
  const dtypes = ['bfloat16', 'float16', 'float32'] as const
  const mixed = checkpointTensors(arch, { values: positionCoded(), dtype: name => dtypes[name.length % 3]! })
  writeTensors(folder, mixed)
  const source = await open(t, folder)
  t.equal(new Set(source.tensors.map(({ dtype }) => dtype)).size, 3)
  for (const { name, data } of mixed) t.ok(storedBytes(source, name).equals(data), name)
})

t.test('checkpoints of save_pretrained are read: one file and shards', async t => {
  for (const name of readdirSync(goldenRoot, { withFileTypes: true }).filter(entry => entry.isDirectory())) {
    t.ok((await open(t, join(goldenRoot, name.name))).tensors.length > 10, name.name)
  }
})

t.test('a path may name a single file, a single shard or an index', async t => {
  const folder = t.testdir()
  const [first] = writeTensors(folder, tensors, 3)
  t.equal((await open(t, join(folder, first!), folder)).sources.length, 1)
  t.equal((await open(t, join(folder, INDEX), folder)).tensors.length, tensors.length)
  t.equal((await open(t, relative(process.cwd(), folder), folder)).tensors.length, tensors.length, 'a relative path')
  t.equal((await open(t, folder + '/', folder)).tensors.length, tensors.length, 'a slash at the end')
})

t.test('closing twice, also at once, closes once', async t => {
  const folder = t.testdir({ 'model.safetensors': small('t') })
  const before = fds()
  const source = await openDiskSource(folder, { roots: [folder] })
  t.equal(fds(), before + 1)
  await Promise.all([source.close(), source.close()])
  await source.close()
  t.equal(fds(), before)
})

t.test('20,000 tensors in 40 files are announced', async t => {
  const folder = t.testdir()
  const data = Buffer.alloc(2)
  for (let file = 0; file < 40; file++) {
    writeFileSync(
      join(folder, `part${file}.safetensors`),
      encodeSafetensors(
        Array.from({ length: 500 }, (_, i) => ({ name: `t.${file}.${i}`, dtype: 'F16', shape: [1], data }))
      )
    )
  }
  t.equal((await open(t, folder)).tensors.length, 20_000)
})

t.test('a hub cache, whose files are links to blobs beside the snapshot, is read when the root holds both', async t => {
  const folder = t.testdir({ blobs: { abc: small('a'), def: small('b') }, snapshots: { rev: {} } })
  const snapshot = join(folder, 'snapshots/rev')
  symlinkSync('../../blobs/abc', join(snapshot, 'model-00001-of-00002.safetensors'))
  symlinkSync('../../blobs/def', join(snapshot, 'model-00002-of-00002.safetensors'))
  t.same((await open(t, snapshot, folder)).tensors.map(({ name }) => name), ['a', 'b'])
  t.same((await open(t, join(snapshot, 'model-00002-of-00002.safetensors'), folder)).tensors.map(({ name }) => name), [
    'b'
  ])
  await refused(
    t,
    snapshot,
    [snapshot],
    'CHECKPOINT_PATH',
    /"model-00001-of-00002.safetensors" is not there, or not inside the allowed roots/
  )
})
