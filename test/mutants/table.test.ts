import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { packageRoot } from '../../src/root.ts'
import { AREAS } from './index.ts'

// The table of planted bugs must fit the program. `npm run test:mutants` plants them and runs the tests.

const rows = Object.entries(AREAS).flatMap(([area, mutants]) => mutants.map(mutant => ({ area, ...mutant })))
const texts = new Map<string, string>()

function textOf (file: string): string {
  let text = texts.get(file)
  if (text === undefined) texts.set(file, text = readFileSync(join(packageRoot, file), 'utf8'))
  return text
}

t.test('every mutant changes one place of a file that exists', async t => {
  for (const { area, file, before, after, why } of rows) {
    const where = `${area}: ${why}: ${file}`
    if (!existsSync(join(packageRoot, file))) {
      t.fail(`${where} does not exist: name the file that the code has moved to`)
      continue
    }
    const places = textOf(file).split(before).length - 1
    if (places !== 1) t.fail(`${where} has "before" ${places} times, expected 1: ${before.trim().slice(0, 100)}`)
    if (before === after) t.fail(`${where}: before and after are equal`)
  }
  t.ok(rows.length >= 120, `${rows.length} mutants`)
})

t.test('every mutant names tests that npm test, native/test or a GPU machine runs', async t => {
  for (const { why, file, tests } of rows) {
    t.ok(tests.length > 0, why)
    for (const test of tests) {
      if (!existsSync(join(packageRoot, test))) t.fail(`${why}: ${test} does not exist`)
      const isNative = file.startsWith('native/') && /^native\/test\/.*\.(cc|cu)$/.test(test)
      if (!isNative && !/^test\/(?!interop|gpu|package|contract|trainers).*\.test\.ts$/.test(test)) {
        t.fail(`${why}: ${test} does not run there`)
      }
    }
  }
})

t.test('no mutant is planted twice, and every reason is one line of its own', async t => {
  const reasons = new Set<string>()
  const edits = new Set<string>()
  for (const { why, file, before, after } of rows) {
    if (why === '' || why.includes('\n')) t.fail(`a reason is one line, got ${JSON.stringify(why)}`)
    const edit = JSON.stringify([file, before, after])
    if (reasons.has(why) || edits.has(edit)) t.fail(`${why} comes twice`)
    reasons.add(why)
    edits.add(edit)
  }
  t.equal(reasons.size, rows.length)
})
