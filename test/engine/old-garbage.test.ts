import t from 'tap'
import { execFileSync } from 'node:child_process'
import { join } from 'node:path'
import { packageRoot } from '../../src/root.ts'

const MODULE = join(packageRoot, 'build/test/src/engine/old-garbage.js')

/** Megabytes of objects at each collection of old ones, while they grow from some 40 MB after one to some 210 MB. */
function collections (setting: string): number[] {
  const program = `
    const { PerformanceObserver, constants } = require('node:perf_hooks')
    const made = count => Array.from({ length: count }, () => Array.from({ length: 1000 }, (_, i) => ({ i })))
    const wait = async ms => await new Promise(resolve => setTimeout(resolve, ms))
    import(${JSON.stringify(MODULE)}).then(async ({ collectOldGarbageLess }) => {
      ${setting}
      const kept = [made(1000)]
      gc()
      await wait(20)
      const found = []
      new PerformanceObserver(list => {
        for (const { detail } of list.getEntries()) {
          if (detail.kind === constants.NODE_PERFORMANCE_GC_MAJOR) {
            found.push(Math.round(process.memoryUsage().heapUsed / 1e6))
          }
        }
      }).observe({ entryTypes: ['gc'] })
      for (let i = 0; i < 135; i++) {
        kept.push(made(30))
        await wait(1)
      }
      await wait(50)
      console.log(JSON.stringify(found))
    })`
  return JSON.parse(execFileSync(process.execPath, ['--expose-gc', '-e', program], { encoding: 'utf8' })) as number[]
}

t.test('old objects are collected when they take five times as much, not four or less', async t => {
  t.not(collections('').length, 0)
  t.same(collections('collectOldGarbageLess()'), [])
})
