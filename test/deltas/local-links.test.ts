import { execFileSync } from 'node:child_process'
import {
  cpSync,
  existsSync,
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
import { pullWeights } from '../../src/deltas/local-checkpoint.ts'
import { native } from '../../src/native/load-addon.ts'
import { code, PublishedHost } from '../helpers/published-host.ts'
import { publishSlime } from '../helpers/published-deltas.ts'

// Another user who may write to the local folder puts links and FIFOs there. `outside` may not be touched.

class Host extends PublishedHost {
  readonly outside: string

  constructor (folder: string) {
    mkdirSync(join(folder, 'roots'))
    super(join(folder, 'roots'))
    this.outside = join(folder, 'outside')
    mkdirSync(this.outside)
  }

  pull (version: number): void {
    pullWeights(
      { localFolder: this.local, baseFolder: this.base, sourceFolder: this.source, targetVersion: version },
      native(),
      real => real.startsWith(`${this.root}/`)
    )
  }

  publish (): void {
    const version = this.next()
    publishSlime(this.source, version, this.versions[version - 1]!, this.versions[version]!, {})
  }
}

function make (t: Test): Host {
  const host = new Host(t.testdir({}))
  host.pull(0)
  host.publish()
  return host
}

const REFUSED = code('CHECKPOINT_PATH', /symlink, which is not followed: remove it/)

t.test('a weight file that is a link is not changed', async t => {
  const host = make(t)
  const [name] = host.files as [string]
  const outside = join(host.outside, name)
  renameSync(join(host.local, name), outside)
  symlinkSync(outside, join(host.local, name))
  const before = readFileSync(outside)
  t.throws(() => {
    host.pull(1)
  }, REFUSED)
  t.ok(readFileSync(outside).equals(before))
})

for (const name of ['lock', 'state.json', 'changing', '.state.json.tmp', '.changing.tmp']) {
  t.test(`a link in the place of ${name} leads nowhere`, async t => {
    const host = make(t)
    const target = join(host.outside, name)
    writeFileSync(target, 'theirs')
    const path = join(host.local, '.weight_sync', name)
    rmSync(path, { force: true })
    symlinkSync(target, path)
    try {
      host.pull(1)
    } catch (error) {
      t.match(error, REFUSED)
    }
    t.equal(readFileSync(target, 'utf8'), 'theirs')
    rmSync(path, { force: true })
    symlinkSync(join(host.outside, 'new'), path)
    try {
      host.pull(1)
    } catch (error) {
      t.match(error, { code: 'CHECKPOINT_PATH' })
    }
    t.notOk(existsSync(join(host.outside, 'new')), 'no file is made through a link')
  })
}

t.test('a folder that is a link is refused', async t => {
  const host = make(t)
  const sync = join(host.local, '.weight_sync')
  cpSync(sync, join(host.outside, 'sync'), { recursive: true })
  const before = readdirSync(join(host.outside, 'sync')).map(name =>
    readFileSync(join(host.outside, 'sync', name), 'utf8')
  )
  rmSync(sync, { recursive: true })
  symlinkSync(join(host.outside, 'sync'), sync)
  t.throws(() => {
    host.pull(1)
  }, REFUSED)
  t.same(
    readdirSync(join(host.outside, 'sync')).map(name => readFileSync(join(host.outside, 'sync', name), 'utf8')),
    before
  )
})

t.test('a FIFO in the place of the lock, of the state and of a weight file is refused at once', async t => {
  const host = make(t)
  for (const path of ['.weight_sync/lock', '.weight_sync/state.json', host.files[0]!]) {
    const full = join(host.local, path)
    const kept = readFileSync(full)
    rmSync(full)
    execFileSync('mkfifo', [full])
    t.throws(
      () => {
        host.pull(1)
      },
      code('CHECKPOINT_FORMAT', /is not a regular file/),
      path
    )
    rmSync(full)
    writeFileSync(full, kept)
  }
  host.pull(1)
  host.holdsIn(t, host.local, 1)
})

t.test('a published index that leads out of the roots is not read, and no message has a part of it', async t => {
  const host = make(t)
  const secret = join(host.outside, 'secret')
  writeFileSync(secret, 'root:secret')
  const index = join(host.source, 'weight_v000001', 'model.safetensors.index.json')
  rmSync(index)
  symlinkSync(secret, index)
  try {
    host.pull(1)
    t.fail('it was read')
  } catch (error) {
    t.match(error, code('CHECKPOINT_PATH', /leads out of the allowed roots/))
    t.notMatch(String(error), /root:s/)
  }
})
