import { delimiter, resolve } from 'node:path'
import { pathToFileURL } from 'node:url'
import t from 'tap'

// REFIT_TEST_FILES=FILE:FILE... REFIT_TEST_PROGRAMS=PATH:PATH... node scripts/run-batch.js NUMBER: runs compiled test
// files one after another in one process, which imports tap, fastify and the program once for all of them. A test named
// "end of FILE" separates their TAP.

// Once tap's root has a teardown, it ends as soon as it has no test to run, also while the next file is loaded.
const teardowns = []
t.teardown = act => {
  teardowns.push(act)
}

const files = process.env.REFIT_TEST_FILES.split(delimiter)
const programs = process.env.REFIT_TEST_PROGRAMS.split(delimiter)
for (const [index, file] of files.entries()) {
  await import(pathToFileURL(resolve(programs[index])).href)
  // tap runs tests in order, so this one begins when those of the file have ended.
  await t.test(`end of ${file}`, async t => {
    if (index === files.length - 1) { for (const act of teardowns.reverse()) await act() }
    t.pass()
  })
}
