import { execFileSync } from 'node:child_process'
import {
  appendFileSync,
  closeSync,
  linkSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  readSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  truncateSync,
  utimesSync,
  writeFileSync
} from 'node:fs'
import { dirname, join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { bytesOf } from '../../src/native/dtypes.ts'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import type { StoredSource } from '../../src/contract/weight-source.ts'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'
import { eventually, failureOf } from '../helpers/eventually.ts'
import { checkpointTensors, positionCoded, writeCheckpoint, writeTensors } from '../helpers/make-checkpoint.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

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

const changes: Array<[string, (path: string) => void, RegExp]> = [
  ['is written to in place', path => {
    const bytes = readFileSync(path)
    bytes[bytes.length - 1]! ^= 1
    writeFileSync(path, bytes)
  }, /mtimeNs|ctimeNs/],
  ['is written to and given its old time', path => {
    writeFileSync(path, readFileSync(path))
    utimesSync(path, 1, 1)
  }, /mtimeNs|ctimeNs/],
  ['is written to and given its own time again', path => {
    const { mtimeNs } = statSync(path, { bigint: true })
    const bytes = readFileSync(path)
    bytes[bytes.length - 1]! ^= 1
    writeFileSync(path, bytes)
    execFileSync('touch', ['-d', `@${mtimeNs / 10n ** 9n}.${String(mtimeNs % 10n ** 9n).padStart(9, '0')}`, path])
    if (statSync(path, { bigint: true }).mtimeNs !== mtimeNs) throw new Error('the time is not restored')
  }, /ctimeNs went from/],
  ['grows', path => {
    appendFileSync(path, 'x')
  }, /size went from/],
  ['is cut', path => {
    truncateSync(path, 20)
  }, /size went from/],
  ['is replaced by rename', path => {
    writeFileSync(path + '.new', readFileSync(path))
    renameSync(path + '.new', path)
  }, /ctimeNs|leads elsewhere/],
  ['is removed', path => {
    rmSync(path)
  }, /ctimeNs|leads elsewhere/],
  ['is in a folder that is swapped', path => {
    const folder = dirname(path)
    renameSync(folder, folder + '-old')
    mkdirSync(folder)
    // Equal files at the same paths: only their inodes differ.
    for (const name of readdirSync(folder + '-old')) {
      writeFileSync(join(folder, name), readFileSync(join(folder + '-old', name)))
    }
  }, /its path now leads elsewhere/],
  ['becomes a link elsewhere', path => {
    linkSync(path, path + '.kept')
    rmSync(path)
    symlinkSync(path + '.other', path)
  }, /ctimeNs|leads elsewhere/]
]
for (const [what, change, message] of changes) {
  t.test(`verify notices when a file ${what}`, async t => {
    const folder = join(t.testdir({ step: {} }), 'step')
    writeCheckpoint(folder, arch, { shards: 2 })
    const source = await open(t, folder)
    await source.verify()
    change(join(folder, 'model-00002-of-00002.safetensors'))
    await t.rejects(source.verify(), { code: 'CHECKPOINT_CHANGED', message: /^model\S+ changed while it was read/ })
    await t.rejects(source.verify(), { message })
  })
}

t.test('verify notices when only the index changes', async t => {
  const folder = t.testdir()
  writeCheckpoint(folder, arch, { shards: 2 })
  const source = await open(t, folder)
  writeFileSync(join(folder, INDEX), readFileSync(join(folder, INDEX)))
  await t.rejects(source.verify(), { code: 'CHECKPOINT_CHANGED', message: /index.json changed/ })
})

t.test('reading changes nothing that verify checks', async t => {
  const folder = t.testdir()
  writeTensors(folder, tensors, 2)
  const source = await open(t, folder)
  for (const { name } of tensors) storedBytes(source, name)
  await source.verify()
})

t.test('a file is opened only when its mtime is in the past, so that a later write changes it', async t => {
  const folder = t.testdir()
  const path = join(folder, 'model.safetensors')
  for (let round = 0; round < 10; round++) {
    writeFileSync(path, small('a'))
    const source = await openDiskSource(folder, { roots: [folder] })
    t.ok(Date.now() - Math.floor(statSync(path).mtimeMs) >= 20, 'two ticks of any kernel')
    writeFileSync(path, small('a'), { flag: 'r+' })
    await t.rejects(source.verify(), { code: 'CHECKPOINT_CHANGED' })
    await source.close()
  }
})

t.test('a file that is written to all the time is refused', async t => {
  const folder = t.testdir({ 'model.safetensors': small('a') })
  const writer = setInterval(() => {
    writeFileSync(join(folder, 'model.safetensors'), small('a'), { flag: 'r+' })
  }, 1)
  const before = fds()
  // If the machine halts, there is no write for a moment, and such a folder is not refused: try again.
  const error = await eventually(
    async () =>
      await failureOf(
        openDiskSource(folder, { roots: [folder] }).then(async source => {
          await source.close()
        })
      ),
    error => error !== null
  )
  clearInterval(writer)
  t.match(error, { name: 'RefitError', code: 'CHECKPOINT_CHANGED', message: /it is being written to right now/ })
  t.equal(fds(), before, 'no file stays open')
})

t.test('a file that is open for writing is refused, because stores through a mapping move no time stamp', async t => {
  const folder = t.testdir({})
  const path = join(folder, 'model.safetensors')
  writeFileSync(path, encodeSafetensors([{ name: 'a', dtype: 'F32', shape: [1], data: Buffer.alloc(4) }]))
  const old = new Date(Date.now() - 60_000)
  utimesSync(path, old, old)
  const writer = openSync(path, 'r+')
  await t.rejects(openDiskSource(path, { roots: [folder] }), {
    code: 'CHECKPOINT_CHANGED',
    message: /is open or mapped for writing/
  })
  closeSync(writer)
  const reader = openSync(path, 'r')
  const source = await openDiskSource(path, { roots: [folder] })
  await source.close()
  closeSync(reader)
})
