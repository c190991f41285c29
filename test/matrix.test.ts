import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import {
  cellOf,
  fullTable,
  isOwn,
  isPassed,
  matrixPages,
  pageOf,
  readMatrix,
  shortTable,
  summary,
  withTable
} from '../scripts/matrix-table.ts'
import type { Row, Run } from '../scripts/matrix-table.ts'
import { packageRoot } from '../src/root.ts'

const { rows, here, cards } = readMatrix(packageRoot)

t.test('README and docs/trainers contain the tables made from the stored results', async t => {
  for (const [page, table] of Object.entries(matrixPages(packageRoot))) {
    const text = readFileSync(join(packageRoot, page), 'utf8')
    t.equal(text, withTable(text, table), `${page}: npm run docs`)
  }
})

t.test('the matrix has rows 1 to 30, each once, and every trainer has a page that names its rows', async t => {
  t.same(
    rows.filter(row => row.extra !== true).map(({ row }) => row),
    Array.from({ length: 30 }, (_, index) => index + 1)
  )
  t.equal(new Set(rows.map(({ row }) => row)).size, rows.length)
  for (const { row, trainer, release } of rows) {
    t.match(release, /\d/, `row ${row} names a release`)
    const page = join(packageRoot, 'docs/trainers', pageOf(trainer))
    t.ok(existsSync(page), page)
    t.match(readFileSync(page, 'utf8'), new RegExp(`\\b${row}\\b`), `row ${row} in ${page}`)
  }
})

t.test('stored results belong to existing rows and were run', async t => {
  for (
    const [name, { rows: of, outcome, brings }] of [here, ...cards === undefined ? [] : [cards]].flatMap(run =>
      Object.entries(run.tests)
    )
  ) {
    t.ok(of.length > 0 && of.every(number => rows.some(({ row }) => row === number)), name)
    t.match(outcome, /^(passed|failed|skipped)$/, name)
    t.ok(brings.every(way => ['gloo', 'NCCL', 'shared memory', 'CUDA IPC', 'files', 'HTTP'].includes(way)), name)
  }
  t.equal(here.cards, null)
  for (const row of rows) {
    t.ok(
      row.absent !== undefined || [here, cards].some(run => run !== undefined && cellOf(row, run) !== 'no test'),
      `row ${row.row} has tests, or a reason why not`
    )
  }
})

const NCCL: Row = { row: 1, trainer: 'slime', release: '1.2', mode: 'x', by: ['NCCL'] }
type Test = Run['tests'][string]
const test = (outcome: Test['outcome'], brings: string[] = [], refused: string | null = null): Test => ({
  rows: [1],
  outcome,
  brings,
  refused
})
const run = (...tests: Test[]): Run => ({
  date: '2026-01-02',
  cards: null,
  torch: '2',
  tests: Object.fromEntries(tests.map((each, index) => [`test_slime.py::${index}`, each]))
})

t.test('a refusal does not pass a row, and a call that should be refused and succeeds fails it', async t => {
  const refused = run(test('passed', [], 'adapters'))
  t.notOk(isPassed(NCCL, refused))
  t.equal(cellOf(NCCL, refused), 'refused')
  t.match(
    fullTable([NCCL], refused),
    /\| 1\.2 \| NCCL \| refused \| {2}\| \[\w+\]\(\.\.\/\.\.\/test\/contract\/\S+\) \| refused: adapters \|/
  )
  t.match(summary([NCCL], [refused]), /^0 of 1 rows pass.*1 is refused or not there \(1\)/)
  t.match(cellOf(NCCL, run(test('passed', ['gloo']), test('failed', [], 'adapters'))), /failed/)
})

t.test('a row passes if weights arrived and nothing failed, and in full if they arrived on GPUs', async t => {
  const without = run(test('passed', ['gloo']), test('skipped', ['NCCL']))
  t.equal(cellOf(NCCL, without), 'passed (gloo)')
  t.ok(isPassed(NCCL, without))
  t.notOk(isOwn(NCCL, [without]))
  t.match(summary([NCCL], [without]), /1 of 1 rows pass, 0 of them .* 1 so far with what stands in for it \(1\)/)
  const own = { ...run(test('passed', ['gloo']), test('passed', ['NCCL'])), cards: '2x H200' }
  t.ok(isOwn(NCCL, [without, own]))
  t.match(summary([NCCL], [without, own]), /^1 of 1 rows pass, all of them .*\. No row fails\.$/)
  t.notOk(isPassed(NCCL, run(test('passed'))), 'no weights arrived')
  t.equal(cellOf(NCCL, run(test('passed'), test('skipped', ['NCCL']))), 'needs GPUs')
  const failed = { ...run(test('failed', ['NCCL'])), cards: '2x H200' }
  t.notOk(isOwn(NCCL, [own, failed]))
  t.match(shortTable([NCCL], without, failed), /\| {2}\| x \|/)
  t.match(summary([NCCL], [without, failed]), /^0 of 1 rows pass.*1 fails \(1\)/)
  t.match(cellOf(NCCL, failed), /failed/)
  t.ok(isPassed({ ...NCCL, by: [] }, run(test('passed'))), 'a mode without weights of its own')
  t.equal(cellOf(NCCL, run({ ...test('passed', ['NCCL']), rows: [2] })), 'no test')
})

t.test('a page without the markers of the table is not part of the matrix', async t => {
  t.equal(
    withTable('a\n<!-- matrix -->\nold\n<!-- /matrix -->\nb', 'new\n'),
    'a\n<!-- matrix -->\nnew\n<!-- /matrix -->\nb'
  )
  t.throws(() => withTable('nothing', 'x'), /matrix/)
})
