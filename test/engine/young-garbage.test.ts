import t from 'tap'
import { execFileSync } from 'node:child_process'
import { join } from 'node:path'
import { getHeapSpaceStatistics } from 'node:v8'
import { collectYoungGarbage } from '../../src/engine/young-garbage.ts'
import { packageRoot } from '../../src/root.ts'

function young (): { used: number, available: number } {
  const space = getHeapSpaceStatistics().find(({ space_name: name }) => name === 'new_space')!
  return { used: space.space_used_size, available: space.space_available_size }
}

t.test('young garbage is collected when there is much of it, and not before', async t => {
  let collected = 0
  let spared = 0
  for (let round = 0; round < 2000 && (collected < 5 || spared < 5); round++) {
    // Some 10 KB, so that V8's own collections come at other times than this one.
    Array.from({ length: 300 }, (_, i) => ({ round, i }))
    const before = young()
    const isDue = before.used > 3 * before.available
    collectYoungGarbage()
    const { used } = young()
    if (isDue && used < before.used / 2) collected++
    if (!isDue && used >= before.used) spared++
  }
  t.equal(collected, 5)
  t.ok(spared >= 5)
  t.notOk('gc' in globalThis, 'other code does not see the collector')
})

const MODULE = join(packageRoot, 'build/test/src/engine/young-garbage.js')

/** The output of a program that has young-garbage.js as `module`. */
function printed (program: string, ...flags: string[]): string {
  const text = `const { Worker } = require('node:worker_threads')
    const { runInNewContext } = require('node:vm')
    const module = ${JSON.stringify(MODULE)}
    ${program}`
  return execFileSync(process.execPath, [...flags, '-e', text], { encoding: 'utf8' }).trim()
}

t.test('a process that exposes the collector keeps it so, and another one does not get it', async t => {
  const program = 'import(module).then(() => console.log(runInNewContext("typeof gc")))'
  t.equal(printed(program, '--expose-gc'), 'function')
  t.equal(printed(program), 'undefined')
})

t.test('many threads may start at once', async t => {
  const program = `
    const one = () => new Promise((resolve, reject) => {
      const text = 'import(' + JSON.stringify(module) + ').then(it => it.collectYoungGarbage())'
      const worker = new Worker(text, { eval: true })
      worker.on('error', reject).on('exit', resolve)
    })
    const all = async () => { for (let i = 0; i < 10; i++) await Promise.all([one(), one(), one(), one()]) }
    all().then(() => console.log('well'))`
  t.equal(printed(program), 'well')
})
