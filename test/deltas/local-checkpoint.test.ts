import { execFileSync } from 'node:child_process'
import {
  chmodSync,
  cpSync,
  existsSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  symlinkSync,
  writeFileSync
} from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { pullWeights } from '../../src/deltas/local-checkpoint.ts'
import type { Pulled } from '../../src/deltas/local-checkpoint.ts'
import { WeightPulls } from '../../src/deltas/weight-pulls.ts'
import { code, PublishedHost } from '../helpers/published-host.ts'
import { publishSlime, weightsOf, writeFile, zstdBomb, zstdFrame } from '../helpers/published-deltas.ts'
import type { SlimeDelta } from '../helpers/published-deltas.ts'

class Host extends PublishedHost {
  publish (options: SlimeDelta = {}): string {
    const version = this.next()
    return publishSlime(this.source, version, this.versions[version - 1]!, this.versions[version]!, options)
  }

  pull (version: number): Pulled {
    return pullWeights(
      {
        localFolder: this.local,
        baseFolder: this.base,
        sourceFolder: this.source,
        targetVersion: version
      },
      native(),
      real => real.startsWith(this.root)
    )
  }

  holds (t: Test, version: number): void {
    this.holdsIn(t, this.local, version)
    t.match(JSON.parse(readFileSync(join(this.local, '.weight_sync/state.json'), 'utf8')), {
      version: String(version).padStart(6, '0')
    })
  }
}

const make = (t: Test): Host => new Host(t.testdir({}))

t.test('every version can be pulled from the base, from the previous version, and in several steps', async t => {
  for (const encoding of ['xor', 'overwrite'] as const) {
    const host = make(t)
    t.match(host.pull(0), { from: null, version: 0, tensors: 0, bytes: 0 })
    host.holds(t, 0)
    t.equal(readFileSync(join(host.local, 'config.json'), 'utf8'), '{"model_type": "any"}')
    for (let i = 0; i < 4; i++) host.publish({ encoding })
    t.match(host.pull(1), { from: 0, version: 1 })
    host.holds(t, 1)
    t.match(host.pull(4), { from: 1, version: 4, tensors: 8 })
    host.holds(t, 4)
    t.match(host.pull(4), { from: 4, version: 4, tensors: 0 }, 'nothing is left to do')
    t.match(host.pull(2), { from: 4, version: 4, tensors: 0 }, 'a pull of an older version changes nothing')
    host.holds(t, 4)
    t.same(weightsOf(host.base, host.files), host.versions[0], 'the base is what it was')
    rmSync(host.root, { recursive: true })
  }
})

t.test('a whole version makes older deltas unnecessary, and files that it does not have are removed', async t => {
  const host = make(t)
  host.publish()
  host.pull(1)
  const whole = join(host.source, 'weight_v000002')
  cpSync(host.base, whole, { recursive: true })
  writeFileSync(join(host.local, 'left.json'), '{}')
  host.versions.push(host.versions[0]!)
  rmSync(join(host.source, 'weight_v000001'), { recursive: true })
  host.publish()
  t.match(host.pull(3), { from: 1, version: 3 })
  host.holds(t, 3)
  t.notOk(existsSync(join(host.local, 'left.json')))
})

t.test('links of a cache and read-only files become writable files of the local checkpoint', async t => {
  const host = make(t)
  mkdirSync(join(host.root, 'blobs'))
  for (const file of host.files) {
    cpSync(join(host.base, file), join(host.root, 'blobs', file))
    rmSync(join(host.base, file))
    symlinkSync(join(host.root, 'blobs', file), join(host.base, file))
    chmodSync(join(host.root, 'blobs', file), 0o444)
  }
  host.publish()
  host.pull(1)
  host.holds(t, 1)
  // Root can write to every file, so this does not hold for root.
  for (const file of host.files) {
    t.ok(lstatSync(join(host.local, file)).isFile() && (lstatSync(join(host.local, file)).mode & 0o200) !== 0)
  }
  t.same(weightsOf(join(host.root, 'blobs'), host.files), host.versions[0])
})

t.test('a wrong version is refused, and can be pulled once it is repaired', async t => {
  const bad: Array<[string, SlimeDelta, ReturnType<typeof code>]> = [
    ['a wrong checksum', {
      edit: (_, sums) => {
        sums['layer.3'] = '00000000'
      }
    }, code('CHECKPOINT_CHANGED', /checksums of 1 tensors.*layer\.3/)],
    ['no checksum', {
      edit: (_, sums) => {
        delete sums['layer.3']
      }
    }, code('CHECKPOINT_CHANGED', /layer\.3/)],
    ['an unknown name', {
      edit: entries => {
        entries.set('layer.77', zstdFrame(Buffer.alloc(3)))
      }
    }, code('WEIGHTS_UNKNOWN_NAME', /layer\.77/)],
    ['no frame', {
      edit: entries => {
        entries.set('layer.3', Buffer.from('hello, this is no frame'))
      }
    }, code('CHECKPOINT_FORMAT', /layer\.3.*does not decompress/)],
    ['a bomb', {
      edit: entries => {
        entries.set('layer.3', zstdBomb(1, 1000))
      }
    }, code('CHECKPOINT_FORMAT', /layer\.3.*more bytes/)],
    ['too few bytes', {
      edit: entries => {
        entries.set('layer.6', zstdFrame(Buffer.alloc(5)))
      }
    }, code('CHECKPOINT_FORMAT', /layer\.6.*fewer bytes/)],
    [
      'another base',
      { metadata: { base_version: '000000' } },
      code('CHECKPOINT_FORMAT', /from version 0 to 2, not from 1 to 2/)
    ],
    [
      'another encoding',
      { metadata: { delta_encoding: 'sum' } },
      code('UNSUPPORTED', /delta_encoding "sum"; expected xor or overwrite/)
    ],
    ['blake3', { metadata: { checksum_format: 'blake3' } }, code('UNSUPPORTED', /checksum_format "blake3"/)],
    [
      'another compression',
      { metadata: { compression_format: 'lz4' } },
      code('UNSUPPORTED', /compression_format "lz4"/)
    ]
  ]
  for (const [name, options, error] of bad) {
    const host = make(t)
    host.publish()
    host.pull(1)
    const folder = host.publish(options)
    t.throws(() => host.pull(2), error, name)
    const [before, after] = host.versions.slice(1)
    rmSync(folder, { recursive: true })
    publishSlime(host.source, 2, before!, after!)
    t.match(host.pull(2), { version: 2 }, `${name}: the next pull`)
    host.holds(t, 2)
    rmSync(host.root, { recursive: true })
  }
})

t.test('a change that broke off leaves a folder without a version', async t => {
  const host = make(t)
  host.publish()
  host.publish()
  host.pull(2)
  // As if the process had been killed in the middle of version 2: half of its files are changed.
  writeFileSync(join(host.local, '.weight_sync/state.json'), '{"version": "000001"}')
  writeFileSync(join(host.local, '.weight_sync/changing'), '2')
  t.match(host.pull(2), { from: null, version: 2 })
  host.holds(t, 2)
  t.same(readdirSync(join(host.local, '.weight_sync')).sort(), ['lock', 'state.json'])
  for (const state of ['{', '[]']) {
    writeFileSync(join(host.local, '.weight_sync/state.json'), state)
    t.throws(() => host.pull(2), code('CHECKPOINT_FORMAT', /state\.json/))
  }
})

t.test('a version with a missing file is refused, whether it is a delta or a whole checkpoint', async t => {
  for (const isWhole of [false, true]) {
    const host = make(t)
    const index = 'model.safetensors.index.json'
    const published = host.publish()
    if (isWhole) {
      cpSync(host.base, published, { recursive: true, force: true })
      host.versions[1] = host.versions[0]!
      for (const file of readdirSync(published)) {
        if (file.endsWith('.safetensors') && !host.files.includes(file)) rmSync(join(published, file))
      }
      writeFileSync(
        join(published, index),
        JSON.stringify({
          weight_map: Object.fromEntries(host
            .files
            .flatMap(file => [...weightsOf(host.base, [file]).keys()].map(name => [name, file])))
        })
      )
    }
    host.pull(0)
    const late = readdirSync(published).filter(name => name.endsWith('.safetensors')).sort().at(-1)!
    renameSync(join(published, late), join(host.root, late))
    t.throws(() => host.pull(1), code('CHECKPOINT_FORMAT', new RegExp(late)), isWhole ? 'whole' : 'changes')
    renameSync(join(host.root, late), join(published, late))
    host.pull(1)
    host.holds(t, 1)
    rmSync(host.root, { recursive: true })
  }
})

t.test('a pull never waits for a FIFO', async t => {
  for (const [index, name] of ['model-00001-of-00002.safetensors', 'model.safetensors.index.json'].entries()) {
    const host = new Host(t.testdir({}))
    const file = join(host.publish(), name)
    rmSync(file)
    execFileSync('mkfifo', [file])
    t.throws(() => host.pull(1), code('CHECKPOINT_FORMAT', /is not a regular file/), `${index}`)
    rmSync(host.root, { recursive: true })
  }
})

t.test('only the files that are loaded are changed', async t => {
  for (const isSingle of [false, true]) {
    const host = make(t)
    const weights = host.versions[0]!
    if (isSingle) {
      for (const file of host.files) rmSync(join(host.base, file))
      host.files.splice(0, 2, 'model.safetensors')
      writeFile(join(host.base, 'model.safetensors'), weights)
    } else {
      writeFileSync(
        join(host.base, 'model.safetensors.index.json'),
        JSON.stringify({
          weight_map: Object.fromEntries(host
            .files
            .flatMap(file => [...weightsOf(host.base, [file]).keys()].map(name => [name, file])))
        })
      )
    }
    writeFile(join(host.base, 'other.safetensors'), weights)
    host.publish()
    host.pull(1)
    host.holds(t, 1)
    rmSync(host.root, { recursive: true })
  }
  const twice = make(t)
  writeFile(join(twice.base, 'other.safetensors'), twice.versions[0]!)
  twice.publish()
  t.throws(() => twice.pull(1), code('CHECKPOINT_FORMAT', /is in .* as well/), 'it is undefined which one is loaded')
})

t.test('version 0 is the checkpoint that this server started with, not that of an earlier run', async t => {
  const host = make(t)
  host.pull(0)
  const other = new Host(join(host.root, 'another'))
  writeFile(
    join(other.base, other.files[0]!),
    new Map([...weightsOf(other.base, [other.files[0]!])].map(([name, data]) => [
      name,
      Buffer.from(data.map(byte => byte ^ 255))
    ]))
  )
  pullWeights(
    { localFolder: host.local, baseFolder: other.base, sourceFolder: host.source, targetVersion: 0 },
    native(),
    () => true
  )
  const theirs = weightsOf(other.base, other.files)
  t.ok(
    [...weightsOf(host.local, host.files)].every(([name, data]) => theirs.get(name)!.equals(data)),
    'it is the other one'
  )
  t.match(host.pull(0), { version: 0 })
  host.holds(t, 0)
  writeFileSync(join(host.local, 'mine.txt'), '')
  host.pull(0)
  t.ok(existsSync(join(host.local, 'mine.txt')), 'the second pull on a host finds the work done')
})

t.test('a new run, and a checkpoint that an earlier boot wrote, start from the base', t => {
  const host = make(t)
  host.publish()
  host.publish()
  host.pull(2)
  t.match(host.pull(0), { version: 0 }, 'version 0 begins a training run')
  host.holds(t, 0)
  host.pull(2)
  const weights = readdirSync(host.local).find(name => name.endsWith('.safetensors'))!
  writeFileSync(join(host.local, weights), Buffer.alloc(64))
  writeFileSync(join(host.local, '.weight_sync/state.json'), '{"version": "000002", "boot_id": "another"}')
  t.match(host.pull(2), { from: null, version: 2 }, 'its bytes may not have reached the disk')
  host.holds(t, 2)
  t.end()
})

t.test('a folder with other files is not changed', t => {
  const host = make(t)
  mkdirSync(host.local, { recursive: true })
  writeFileSync(join(host.local, 'model.safetensors'), 'precious')
  t.throws(() => host.pull(0), code('CHECKPOINT_PATH', /files that were not pulled/))
  t.equal(readFileSync(join(host.local, 'model.safetensors'), 'utf8'), 'precious')
  t.end()
})

t.test('published links may not lead out of the roots', async t => {
  const folder = t.testdir({ roots: {} })
  const host = new Host(join(folder, 'roots'))
  const published = host.publish()
  const file = readdirSync(published).find(name => name.endsWith('.safetensors'))!
  renameSync(join(published, file), join(folder, file))
  symlinkSync(join(folder, file), join(published, file))
  t.throws(() => host.pull(1), code('CHECKPOINT_PATH', /leads out of the allowed roots/))
})

t.test("pulls of one folder run one after another, and the model's own folder is refused", async t => {
  const host = make(t)
  for (let i = 0; i < 3; i++) host.publish()
  const pulls = new WeightPulls({ roots: [host.root], baseFolder: host.base })
  const ask = async (version: number, fields: object = {}): Promise<Pulled> =>
    await pulls.pull({ localFolder: host.local, sourceFolder: host.source, targetVersion: version, ...fields })
  const done = await Promise.all([1, 3, 2, 3, 1, 2].map(async version => await ask(version)))
  t.ok(done.every(({ version }, index) => version >= [1, 3, 2, 3, 1, 2][index]!))
  host.holds(t, 3)
  for (
    const [fields, param] of [
      [{ localFolder: host.base }, 'local_checkpoint_dir'],
      [{ localFolder: join(host.base, 'inside') }, 'local_checkpoint_dir'],
      [{ localFolder: host.source }, 'local_checkpoint_dir'],
      [{ localFolder: '/etc/refit' }, 'local_checkpoint_dir'],
      [{ localFolder: `${host.local}\0` }, 'local_checkpoint_dir'],
      [{ localFolder: join(host.root, 'n'.repeat(300)) }, 'local_checkpoint_dir'],
      [{ localFolder: join(host.base, host.files[0]!) }, 'local_checkpoint_dir'],
      [{ sourceFolder: '/etc' }, 'source_dir'],
      [{ sourceFolder: join(host.root, 'nothing') }, 'source_dir']
    ] as const
  ) await t.rejects(ask(3, fields), { code: 'CHECKPOINT_PATH', param })
  await t.rejects(ask(4), { code: 'CHECKPOINT_PATH', param: 'target_version' })
  host.holds(t, 3)
})
