import {
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  symlinkSync,
  truncateSync,
  unlinkSync,
  writeFileSync
} from 'node:fs'
import { join } from 'node:path'
import { setImmediate as breathe } from 'node:timers/promises'
import { Worker } from 'node:worker_threads'
import t from 'tap'
import { RefitError } from '../../src/errors.ts'
import { openDiskSource } from '../../src/sources/disk/disk.ts'
import { PathJail } from '../../src/sources/disk/path-jail.ts'
import { writeCheckpoint } from '../helpers/make-checkpoint.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

const fds = (): number => readdirSync('/proc/self/fd').length

t.test('a folder that is repeatedly swapped for a link never lets a file outside the roots be opened', async t => {
  const folder = t.testdir({ root: { sub: { file: 'inside' } }, out: { file: 'outside' } })
  const root = join(folder, 'root')
  symlinkSync('../out', join(root, 'evil'))
  // A thread of its own: swaps fall between any two system calls of the jail.
  const swapper = new Worker(
    `
    const { renameSync } = require('node:fs')
    const { workerData: root } = require('node:worker_threads')
    for (;;) {
      renameSync(root + '/sub', root + '/kept'); renameSync(root + '/evil', root + '/sub')
      renameSync(root + '/sub', root + '/evil'); renameSync(root + '/kept', root + '/sub')
    }`,
    { eval: true, workerData: root }
  )
  const before = fds()
  const jail = await PathJail.of([root])
  const counts = { opened: 0, refused: 0 }
  for (let round = 0; round < 2000 || counts.opened === 0 || counts.refused === 0; round++) {
    try {
      const handle = await jail.open(join(root, 'sub/file'))
      counts.opened++
      const text = await handle.readFile('utf8')
      await handle.close()
      if (text !== 'inside') t.fail('a file outside was opened')
    } catch (error) {
      if (!(error instanceof RefitError)) throw error
      counts.refused++
    }
  }
  await swapper.terminate()
  t.comment(JSON.stringify(counts))
  t.ok(counts.opened > 0 && counts.refused > 0, 'both sides of the swap were seen')
  t.ok(fds() <= before, 'no file stays open')
})

t.test('a writer that races the reader causes an error of refit, and leaves nothing open', async t => {
  const folder = join(t.testdir({ ckpt: {} }), 'ckpt')
  const arch = tinyArchitecture('Qwen3ForCausalLM', {
    num_hidden_layers: 1,
    hidden_size: 8,
    intermediate_size: 8,
    head_dim: 2
  })
  writeCheckpoint(folder, arch, { shards: 2 })
  const path = join(folder, 'model-00002-of-00002.safetensors')
  const good = readFileSync(path)
  const harm: Array<() => void> = [
    () => {
      truncateSync(path, good.length - 1)
    },
    () => {
      truncateSync(path, 4)
    },
    () => {
      unlinkSync(path)
    },
    () => {
      writeFileSync(path, Buffer.concat([good, good]))
    },
    () => {
      writeFileSync(path + '.x', good.subarray(0, 50))
      renameSync(path + '.x', path)
    },
    () => {
      writeFileSync(join(folder, 'model.safetensors.index.json'), '{')
    }
  ]
  const index = readFileSync(join(folder, 'model.safetensors.index.json'))
  const before = fds()
  for (let round = 0; round < 120; round++) {
    rmSync(path, { force: true })
    writeFileSync(path, good)
    writeFileSync(join(folder, 'model.safetensors.index.json'), index)
    const harmed = new AbortController()
    const reading = (async () => {
      const source = await openDiskSource(folder, { roots: [folder] })
      try {
        while (!harmed.signal.aborted) await breathe()
        await source.verify()
      } finally {
        await source.close()
      }
    })()
      .then(() => 'fine', (error: unknown) => error)
    for (let i = 0; i < round; i++) await breathe()
    harm[round % harm.length]!()
    harmed.abort()
    const outcome = await reading
    if (!(outcome instanceof RefitError)) t.fail(`round ${round}: ${String(outcome)}`)
    else if (outcome.statusCode !== 400) t.fail(`round ${round}: ${outcome.code}`)
  }
  t.equal(fds(), before)
})
