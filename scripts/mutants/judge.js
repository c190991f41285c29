import { NativeWorkspace } from './native-workspace.js'

/**
 * Plants one mutant and runs its tests until one fails. `passed` remembers which tests pass without a mutant: a test
 * that fails anyway would catch everything.
 */
export async function judge (mutant, workspace, passed) {
  const began = performance.now()
  const done = (outcome, note) => ({ outcome, note, seconds: (performance.now() - began) / 1000 })
  const tests = mutant.tests.filter(test => NativeWorkspace.lacks(test) === null)
  if (tests.length === 0) return done('skipped', NativeWorkspace.lacks(mutant.tests[0]))
  try {
    for (const test of tests) {
      const key = `${workspace.kind} ${test}`
      if (!passed.has(key)) passed.set(key, workspace.run(test))
      const failure = await passed.get(key)
      if (failure !== null) return done('error', `${test} fails without the mutant: ${failure}`)
    }
    const restore = await workspace.plant(mutant)
    try {
      for (const test of tests) {
        const failure = await workspace.run(test)
        if (failure !== null) return done('caught', `${test} ${failure}`)
      }
    } finally {
      restore()
    }
    return done('survived', tests.join(', '))
  } catch (error) {
    return done('error', error.message)
  }
}
