import { resolve } from 'node:path'
import { pathToFileURL } from 'node:url'
import t from 'tap'

// node scripts/run-batch.js FILE...: runs compiled test files one after another in one process, which imports tap,
// fastify and the program once for all of them. A test named "end of FILE" separates their TAP.

for (const file of process.argv.slice(2)) {
  await import(pathToFileURL(resolve(file)).href)
  // tap runs tests in order, so this one begins when those of the file have ended.
  await t.test(`end of ${file}`, async t => t.pass())
}
