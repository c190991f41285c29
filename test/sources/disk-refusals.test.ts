import { execFileSync } from 'node:child_process'
import { chmodSync, readdirSync, symlinkSync, truncateSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import type { StoredSource } from '../../src/contract/weight-source.ts'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'

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

function small (name: string, bytes = 4): Buffer {
  return encodeSafetensors([{ name, dtype: 'BF16', shape: [bytes / 2], data: Buffer.alloc(bytes, 1) }])
}

/** Refused with this message, by each of its ways in, and nothing stays open. */
async function refused (t: Test, path: string, roots: string[], code: string, message: RegExp): Promise<void> {
  const before = fds()
  await t.rejects(openDiskSource(path, { roots }), { name: 'RefitError', code, message })
  t.equal(fds(), before, 'no file stays open')
}

t.test('an absent and a forbidden path get the same message', async t => {
  const folder = t.testdir({
    in: { 'model.safetensors': small('a') },
    out: { 'model.safetensors': small('b'), secret: 'x' },
    'in-not': { 'model.safetensors': small('c') }
  })
  const root = join(folder, 'in')
  symlinkSync('../out', join(root, 'up'))
  symlinkSync('../out/model.safetensors', join(root, 'up.safetensors'))
  symlinkSync('loop', join(root, 'loop'))
  symlinkSync('../out/nothing', join(root, 'dangling'))
  const paths = [
    join(folder, 'out'),
    join(folder, 'out/model.safetensors'),
    join(folder, 'out/secret'),
    join(folder, 'nothing'),
    join(folder, 'in-not'),
    join(root, 'nothing'),
    join(root, 'up'),
    join(root, 'up/model.safetensors'),
    join(root, 'up.safetensors'),
    join(root, 'dangling'),
    join(root, 'loop'),
    `${root}/../out`,
    `${root}/..`,
    '/',
    '/etc/passwd',
    '/dev/zero',
    '/proc/self/mem',
    '',
    root + '\0',
    `${root}/model.safetensors/x`,
    `${root}/${'n'.repeat(5000)}`,
    '/root/nothing'
  ]
  for (const path of paths) {
    await refused(t, path, [root], 'CHECKPOINT_PATH', /./)
    await t.rejects(openDiskSource(path, { roots: [root] }), {
      message: `${JSON.stringify(path)} is not there, or not inside the allowed roots (--model-root)`
    })
  }
  t.ok(await open(t, `${root}/../in`, root), 'dots that lead back inside are fine')
})

t.test('roots may be links or absent, and without roots every path is refused', async t => {
  const folder = t.testdir({ real: { 'model.safetensors': small('a') } })
  symlinkSync('real', join(folder, 'link'))
  t.ok(await open(t, join(folder, 'real'), join(folder, 'link')))
  t.ok(await open(t, join(folder, 'link'), join(folder, 'real')))
  t.ok(await open(t, join(folder, 'link'), '/'))
  await refused(t, join(folder, 'real'), [], 'CHECKPOINT_PATH', /is not there, or not inside/)
  await refused(t, join(folder, 'real'), [join(folder, 'gone')], 'CHECKPOINT_PATH', /is not there, or not inside/)
})

t.test('FIFOs, sockets, devices and folders in the place of files are refused, without waiting', async t => {
  const folder = t.testdir({ fifo: {}, folder: { 'model.safetensors': {} }, link: {}, index: {}, named: {} })
  execFileSync('mkfifo', [join(folder, 'fifo/model.safetensors'), join(folder, 'index', INDEX)])
  symlinkSync('/dev/zero', join(folder, 'link/model.safetensors'))
  for (const name of ['fifo', 'folder']) {
    await refused(t, join(folder, name), [folder], 'CHECKPOINT_PATH', /model.safetensors is not a regular file/)
  }
  await refused(t, join(folder, 'index'), [folder], 'CHECKPOINT_PATH', /index.json is not a regular file/)
  await refused(t, join(folder, 'link'), [folder], 'CHECKPOINT_PATH', /is not there, or not inside/)
  await refused(t, join(folder, 'link'), ['/'], 'CHECKPOINT_PATH', /is not a regular file/)
  await refused(t, join(folder, 'fifo/model.safetensors'), [folder], 'CHECKPOINT_PATH', /is not a regular file/)
})

t.test(
  'a file that may not be read is named',
  { skip: process.getuid?.() === 0 && 'root may read everything' },
  async t => {
    const folder = t.testdir({ 'model.safetensors': small('a') })
    chmodSync(join(folder, 'model.safetensors'), 0)
    await refused(t, folder, [folder], 'CHECKPOINT_PATH', /model.safetensors cannot be opened \(EACCES\)/)
  }
)

const index = (map: Record<string, string>): string => JSON.stringify({ metadata: { total_size: 1 }, weight_map: map })
const folders: Array<[string, Record<string, string | Buffer>, string, RegExp]> = [
  ['nothing', {}, 'CHECKPOINT_PATH', /holds no .safetensors file: it is empty/],
  ['other files', { 'README.md': 'x' }, 'CHECKPOINT_PATH', /holds no .safetensors file$/],
  [
    'pickled weights',
    { 'pytorch_model.bin': 'x', 'config.json': '{}' },
    'CHECKPOINT_PATH',
    /holds pytorch_model.bin, but no .safetensors file; refit reads safetensors only/
  ],
  ['GGUF', { 'model-q4.gguf': 'x' }, 'CHECKPOINT_PATH', /holds model-q4.gguf, but no/],
  [
    'half-written files only',
    { '.model.safetensors': small('a'), 'model.safetensors.tmp': small('a') },
    'CHECKPOINT_PATH',
    /holds no .safetensors file/
  ],
  ['an empty file', { 'model.safetensors': '' }, 'CHECKPOINT_FORMAT', /model.safetensors: 0 bytes are too few/],
  [
    'a pointer of git-lfs',
    { 'model.safetensors': 'version https://git-lfs.github.com/spec/v1\n' },
    'CHECKPOINT_FORMAT',
    /is it a safetensors file/
  ],
  [
    'a cut file',
    { 'model.safetensors': small('a', 40).subarray(0, -1) },
    'CHECKPOINT_FORMAT',
    /cut off or still being written/
  ],
  [
    'a file cut in its header',
    { 'model.safetensors': small('a', 40).subarray(0, 20) },
    'CHECKPOINT_FORMAT',
    /cut off or still being written/
  ],
  [
    'a file with a tail',
    { 'model.safetensors': Buffer.concat([small('a'), Buffer.alloc(9)]) },
    'CHECKPOINT_FORMAT',
    /bytes follow that no tensor owns/
  ],
  [
    'eight-bit floats',
    { 'model.safetensors': encodeSafetensors([{ name: 'w', dtype: 'F8_E4M3', shape: [2], data: Buffer.alloc(2) }]) },
    'CHECKPOINT_FORMAT',
    /tensor "w": dtype F8_E4M3 is not supported; refit reads BF16, F16 and F32/
  ],
  ['a bad second file', { 'a.safetensors': small('a'), 'b.safetensors': 'x' }, 'CHECKPOINT_FORMAT', /b.safetensors/],
  [
    'a tensor in two files',
    { 'a.safetensors': small('t'), 'b.safetensors': small('t') },
    'CHECKPOINT_FORMAT',
    /b.safetensors: tensor "t": is in a.safetensors as well/
  ],
  [
    'shards with one missing',
    { 'model-00001-of-00003.safetensors': small('a'), 'model-00003-of-00003.safetensors': small('b') },
    'CHECKPOINT_PATH',
    /lacks model-00002-of-00003.safetensors/
  ],
  [
    'shards without the last one',
    { 'model-00001-of-00003.safetensors': small('a'), 'model-00002-of-00003.safetensors': small('b') },
    'CHECKPOINT_PATH',
    /lacks model-00003-of-00003.safetensors/
  ],
  [
    'shards of two saves',
    {
      'model-00001-of-00002.safetensors': small('a'),
      'model-00002-of-00002.safetensors': small('b'),
      'model-00003-of-00003.safetensors': small('c')
    },
    'CHECKPOINT_PATH',
    /mixes shards of different saves: model of 00002, model of 00003/
  ],
  [
    'a shard of a million',
    { 'model-00001-of-1000000.safetensors': small('a') },
    'CHECKPOINT_PATH',
    /speaks of 1000000 shards/
  ],
  [
    'a whole model and shards',
    { 'model.safetensors': small('a'), 'model-00001-of-00001.safetensors': small('b') },
    'CHECKPOINT_PATH',
    /holds both model.safetensors and shards/
  ],
  [
    'a whole model and an index of others',
    { 'model.safetensors': small('a'), 'x.safetensors': small('b'), [INDEX]: index({ b: 'x.safetensors' }) },
    'CHECKPOINT_PATH',
    /holds both model.safetensors and an model.safetensors.index.json/
  ],
  [
    'an index of a missing shard',
    { 'x.safetensors': small('a'), [INDEX]: index({ a: 'x.safetensors', b: 'y.safetensors' }) },
    'CHECKPOINT_PATH',
    /"y.safetensors" is not there/
  ],
  [
    'an index that leads up',
    { 'x.safetensors': small('a'), [INDEX]: index({ a: '../x.safetensors' }) },
    'CHECKPOINT_FORMAT',
    /not a plain name/
  ],
  [
    'an index of a tensor that no file has',
    { 'x.safetensors': small('a'), [INDEX]: index({ a: 'x.safetensors', b: 'x.safetensors' }) },
    'CHECKPOINT_FORMAT',
    /index.json: tensor "b": should be in x.safetensors, but no file has it/
  ],
  [
    'an index that mixes up files',
    {
      'x.safetensors': small('a'),
      'y.safetensors': small('b'),
      [INDEX]: index({ a: 'y.safetensors', b: 'x.safetensors' })
    },
    'CHECKPOINT_FORMAT',
    /tensor "a": should be in y.safetensors, but is in x.safetensors/
  ],
  ['a broken index', { 'x.safetensors': small('a'), [INDEX]: '{' }, 'CHECKPOINT_FORMAT', /bad index/]
]
for (const [what, files, code, message] of folders) {
  t.test(`a folder with ${what} is refused`, async t => {
    const folder = t.testdir(files)
    await refused(t, folder, [folder], code, message)
  })
}

t.test('files that an index does not name are not read', async t => {
  const folder = t.testdir({
    'x.safetensors': small('a'),
    'stale.safetensors': 'broken',
    [INDEX]: index({ a: 'x.safetensors' })
  })
  t.same((await open(t, folder)).tensors.map(({ name }) => name), ['a'])
})

t.test('files of other formats are refused by their names', async t => {
  const folder = t.testdir({ 'model.bin': 'x', 'model.gguf': 'x' })
  for (const name of ['model.bin', 'model.gguf']) {
    await refused(
      t,
      join(folder, name),
      [folder],
      'CHECKPOINT_PATH',
      /is not a .safetensors file; refit reads safetensors only/
    )
  }
})

t.test('headers with false sizes are refused before they are allocated', async t => {
  const folder = t.testdir()
  const path = join(folder, 'model.safetensors')
  writeFileSync(path, Buffer.from([0, 0xe1, 0xf5, 5, 0, 0, 0, 0]))
  truncateSync(path, 100_000_007)
  const before = process.memoryUsage().rss
  await refused(t, folder, [folder], 'CHECKPOINT_FORMAT', /takes 100000000 bytes, but the file has 100000007/)
  t.ok(process.memoryUsage().rss - before < 50e6)
})

t.test('the headers of all files together have a limit', async t => {
  const folder = t.testdir()
  for (const name of ['a', 'b', 'c']) {
    const path = join(folder, `${name}.safetensors`)
    const prefix = Buffer.alloc(10, '{}')
    prefix.writeBigUInt64LE(40_000_000n)
    const padded = Buffer.alloc(40_000_008, ' ')
    prefix.copy(padded)
    padded.write('{}', 8)
    writeFileSync(path, padded)
  }
  await refused(
    t,
    folder,
    [folder],
    'CHECKPOINT_FORMAT',
    /c.safetensors: with it the headers of this checkpoint pass 100000000 bytes/
  )
})
