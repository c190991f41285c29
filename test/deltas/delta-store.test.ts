import { existsSync, mkdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { readManifest } from '../../src/deltas/delta-manifest.ts'
import { fetchDeltas, fetchedFolder } from '../../src/deltas/delta-store.ts'
import type { Fetched, FetchRequest } from '../../src/deltas/delta-store.ts'
import { WeightPulls } from '../../src/deltas/weight-pulls.ts'
import { code, PublishedHost } from '../helpers/published-host.ts'
import { changed, publishSkyrl, weightsOf, writeFile, xorOf, zstdFrame } from '../helpers/published-deltas.ts'

class Host extends PublishedHost {
  publish (edit?: Parameters<typeof publishSkyrl>[4]): string {
    return this.again(this.next(), edit)
  }

  again (version: number, edit?: Parameters<typeof publishSkyrl>[4]): string {
    return publishSkyrl(this.source, version, this.versions[version - 1]!, this.versions[version]!, edit)
  }

  fetch (targetVersion: number, fields: Partial<FetchRequest> = {}): Fetched {
    const request = {
      localFolder: this.local,
      baseFolder: this.base,
      baseName: 'org/model',
      isOwn: true,
      targetVersion,
      syncFolder: this.source,
      targetFolder: null,
      ...fields
    }
    return fetchDeltas(request, native(), real => real.startsWith(this.root))
  }

  get state (): unknown {
    return JSON.parse(readFileSync(this.statePath, 'utf8'))
  }
  set state (value: object) {
    writeFileSync(this.statePath, JSON.stringify(value))
  }
  get statePath (): string {
    return join(this.local, '.skyrl_weight_sync/state.json')
  }

  async holds (t: Test, version: number): Promise<void> {
    this.holdsIn(t, await fetchedFolder(this.local, version), version)
    t.match(this.state, {
      version,
      write_in_progress: false,
      target_version: null,
      base_model_path: 'org/model',
      manifest_sha256: version === 0 ? '' : /^[\da-f]{64}$/
    })
  }
}

const make = (t: Test): Host => new Host(t.testdir({}))

t.test('every version can be fetched, an empty change included', async t => {
  const host = make(t)
  for (let i = 0; i < 3; i++) host.publish()
  t.match(host.fetch(1), { version: 1, tensors: 3 })
  await host.holds(t, 1)
  t.match(host.fetch(3, { targetFolder: join(host.source, 'delta-00000003') }), { version: 3, tensors: 5 })
  await host.holds(t, 3)
  t.match(host.fetch(3), { tensors: 0 }, 'nothing is left to do')
  host.versions.push(host.versions[3]!)
  host.again(4)
  t.match(host.fetch(4), { version: 4, tensors: 0, bytes: 0 })
  await host.holds(t, 4)
  for (const older of [3, 2, 0]) {
    t.throws(() => host.fetch(older), code('CONFLICT', new RegExp(`of version 4, and target_version ${older}`)))
  }
  await host.holds(t, 4)
  await t.rejects(fetchedFolder(host.local, 2), code('CONFLICT', /it is of version 4/))
  await t.rejects(fetchedFolder(join(host.root, 'nowhere'), 0), code('CONFLICT', /nothing has been fetched/))
  t.same(weightsOf(host.base, host.files), host.versions[0], 'the base is what it was')
})

t.test('a missing version does not change the versions before it', async t => {
  const host = make(t)
  host.publish()
  host.publish()
  t.throws(() => host.fetch(4), code('CHECKPOINT_PATH', /delta-00000003 does not exist/))
  await host.holds(t, 2)
  t.throws(
    () => host.fetch(4, { syncFolder: null, targetFolder: host.source }),
    code('INVALID_REQUEST', /sync_dir.*version 3/)
  )
  await host.holds(t, 2)
})

t.test('after a broken fetch, with other weights or without weights, the next fetch starts from the base', async t => {
  const host = make(t)
  host.publish()
  host.publish()
  const broken: Array<() => void> = [
    () => {
      host.state = { version: 1, write_in_progress: true, target_version: 2, base_model_path: 'org/model' }
    },
    () => {
      host.state = { version: 2, write_in_progress: false, target_version: null, base_model_path: 'org/other' }
    },
    () => {
      host.state = { version: 'two', write_in_progress: false, base_model_path: 'org/model' }
    },
    () => {
      rmSync(join(host.local, 'weights'), { recursive: true })
    }
  ]
  for (const harm of broken) {
    host.fetch(2)
    harm()
    t.match(host.fetch(2), { version: 2, tensors: 6 })
    await host.holds(t, 2)
  }
  host.state = { version: 1, write_in_progress: true, target_version: 2, base_model_path: 'org/model' }
  await t.rejects(fetchedFolder(host.local, 2), code('CONFLICT', /a fetch of version 2 runs or has broken off/))
})

t.test('a later run that publishes other weights under the same versions is noticed', async t => {
  const host = make(t)
  host.publish()
  host.publish()
  host.fetch(2)
  const later = (version: number): void => {
    host.versions[version] = changed(host.versions[version - 1]!, version + 10)
    host.again(version)
  }
  later(1)
  later(2)
  t.match(host.fetch(2), { version: 2, tensors: 5 }, 'from the base')
  await host.holds(t, 2)
  // The same for a run that has continued and whose first versions were deleted since.
  host.publish()
  rmSync(join(host.source, 'delta-00000002'), { recursive: true })
  t.match(host.fetch(3), { version: 3 })
  await host.holds(t, 3)
  // A state without a digest, as SkyRL's own receiver writes it, is accepted.
  host.state = { version: 3, write_in_progress: false, target_version: null, base_model_path: 'org/model' }
  t.match(host.fetch(3), { tensors: 0 })
})

t.test('a wrong version is refused unchanged, and after a wrong checksum the next fetch starts again', async t => {
  type Edit = NonNullable<Parameters<typeof publishSkyrl>[4]>
  const first = (fields: object): Edit => ({ tensors }) => {
    Object.assign(tensors[0]!, fields)
  }
  const bad: Array<[string, Edit, ReturnType<typeof code>]> = [
    ['an unknown name', first({ name: 'layer.77' }), code('WEIGHTS_UNKNOWN_NAME', /layer\.77/)],
    ['a size that lies', first({ uncompressed_num_bytes: 3 }), code('CHECKPOINT_FORMAT', /3 bytes of "layer\.\d"/)],
    ['a missing key', first({ payload_key: 'nothing' }), code('CHECKPOINT_FORMAT', /no tensor "nothing"/)],
    [
      'a missing file',
      first({ payload_file: 'nothing.safetensors' }),
      code('CHECKPOINT_PATH', /nothing\.safetensors does not exist/)
    ],
    [
      'a way out',
      first({ payload_file: '../../base/model-00001-of-00002.safetensors' }),
      code('CHECKPOINT_FORMAT', /payload_file/)
    ],
    ['a folder', first({ payload_file: '..' }), code('CHECKPOINT_FORMAT', /payload_file/)],
    [
      'a link out',
      first({ payload_file: 'link.safetensors' }),
      code('CHECKPOINT_PATH', /leads out of the allowed roots/)
    ],
    ['twice the same', ({ tensors }) => {
      tensors.push(tensors[0]!)
    }, code('CHECKPOINT_FORMAT', /changed twice/)],
    ['another base', manifest => {
      manifest.base_version = 0
    }, code('CHECKPOINT_FORMAT', /from version 0 to 2, not from 1 to 2/)],
    ['blake3', first({ checksum_algorithm: 'blake3' }), code('UNSUPPORTED', /blake3/)],
    ['no size', first({ uncompressed_num_bytes: -1 }), code('CHECKPOINT_FORMAT', /uncompressed_num_bytes/)]
  ]
  for (const [name, edit, error] of bad) {
    const host = make(t)
    symlinkSync('/etc/passwd', join(host.root, 'link'))
    host.publish()
    host.fetch(1)
    const folder = host.publish(edit)
    symlinkSync('/etc/passwd', join(folder, 'link.safetensors'))
    t.throws(() => host.fetch(2), error, name)
    await host.holds(t, 1)
    host.again(2)
    t.match(host.fetch(2), { version: 2 })
    await host.holds(t, 2)
    rmSync(host.root, { recursive: true })
  }
  const host = make(t)
  host.publish()
  host.fetch(1)
  host.publish(first({ checksum: '0'.repeat(64) }))
  t.throws(() => host.fetch(2), code('CHECKPOINT_CHANGED', /checksums of 1 tensors/))
  await t.rejects(fetchedFolder(host.local, 1), code('CONFLICT', /broken off/))
  host.again(2)
  t.match(host.fetch(2), { version: 2, tensors: 6 }, 'from the base')
  await host.holds(t, 2)
})

t.test('checksums may be XXH3, or SHA-256 in the field of the first manifests', async t => {
  const host = make(t)
  // The first 403 bytes of the buffer of xxHash's own tests, and the result of its reference program.
  let state = 2654435761n
  const wanted = Buffer.from(Array.from({ length: 403 }, () => {
    const byte = Number(state >> 56n)
    state = BigInt.asUintN(64, state * 11400714785074694797n)
    return byte
  }))
  const old = Buffer.alloc(403, 7)
  rmSync(host.base, { recursive: true })
  mkdirSync(host.base)
  writeFile(join(host.base, 'model.safetensors'), new Map([['a', old], ['b', old]]))
  const folder = join(host.source, 'delta-00000001')
  mkdirSync(folder)
  writeFile(join(folder, 'file'), new Map([['a', zstdFrame(xorOf(old, wanted))], ['b', zstdFrame(Buffer.alloc(403))]]))
  const record = (name: string, sum: object): object => ({
    name,
    uncompressed_num_bytes: 403,
    payload_file: 'file',
    payload_key: name,
    ...sum
  })
  const publish = (sum: object): void => {
    writeFileSync(
      join(folder, 'manifest.json'),
      JSON.stringify({
        version: 1,
        base_version: 0,
        tensors: [record('a', { checksum: '1b6de21e332dd73dcdeb804d65c6dea4' }), record('b', sum)]
      })
    )
  }
  publish({ checksum: '0'.repeat(32) })
  t.throws(() => host.fetch(1), code('CHECKPOINT_CHANGED', /1 tensors.*: b\./))
  publish({ sha256: (await import('node:crypto')).createHash('sha256').update(old).digest('hex') })
  t.match(host.fetch(1), { tensors: 2, bytes: 806 })
  t.same(weightsOf(join(host.local, 'weights'), ['model.safetensors']), new Map([['a', wanted], ['b', old]]))
})

t.test('an invalid manifest is refused and its field named', async t => {
  for (
    const fields of [
      {},
      { version: 1 },
      { version: '1', base_version: 0 },
      { version: 1, base_version: 0, tensors: {} },
      { version: 1, base_version: 0, tensors: [null] },
      { version: 1, base_version: 0, tensors: [{ name: 'a' }] }
    ]
  ) {
    t.throws(
      () => readManifest(fields, 'manifest.json'),
      code('CHECKPOINT_FORMAT', /^manifest\.json/),
      JSON.stringify(fields)
    )
  }
})

t.test('folders must lie in the roots, fetches run one after another, and object stores are refused', async t => {
  const host = make(t)
  for (let i = 0; i < 3; i++) host.publish()
  const pulls = new WeightPulls({ roots: [host.root], baseFolder: host.base })
  for (
    const [local, base, param] of [
      ['/etc/refit', 'org/model', 'local_checkpoint_dir'],
      [host.base, 'org/model', 'local_checkpoint_dir'],
      [join(host.base, 'x'), 'org/model', 'local_checkpoint_dir'],
      [host.local, '/no/such', 'base_model_path'],
      [host.local, '/etc', 'base_model_path']
    ] as const
  ) await t.rejects(pulls.host(local, base), { code: 'CHECKPOINT_PATH', param }, `${local} ${base}`)
  t.notOk(existsSync('/etc/refit'))
  t.match(await pulls.host(host.local, host.base), { isOwn: true })
  const at = await pulls.host(host.local, 'org/model')
  const where = { syncDir: host.source, uri: null }
  for (const uri of ['gs://bucket/run', 's3://bucket/run', 'https://host/run']) {
    await t.rejects(pulls.fetch(at, { targetVersion: 1, syncDir: uri, uri: null }), {
      code: 'UNSUPPORTED',
      param: 'sync_dir'
    })
    await t.rejects(pulls.fetch(at, { targetVersion: 1, syncDir: host.source, uri }), {
      code: 'UNSUPPORTED',
      param: 'uri'
    })
  }
  await t.rejects(pulls.fetch(at, { ...where, targetVersion: 1, syncDir: '/etc' }), {
    code: 'CHECKPOINT_PATH',
    param: 'sync_dir'
  })
  await t.rejects(pulls.fetch(at, { ...where, targetVersion: 1, uri: host.local }), {
    code: 'CHECKPOINT_PATH',
    param: 'local_checkpoint_dir'
  })
  const done = await Promise.all(
    [3, 3, 3, 3].map(async targetVersion => await pulls.fetch(at, { ...where, targetVersion }))
  )
  t.same(done.map(({ tensors }) => tensors), [8, 8, 8, 8], 'equal fetches are one fetch')
  t.equal(await pulls.fetched(at, 3), join(at.localFolder, 'weights'))
  await host.holds(t, 3)
})
