import { readFileSync } from 'node:fs'
import { join } from 'node:path'

/** A row of test/contract/rows.json. `by`: the carriers of the mode's weights; none if the mode sends no weights. */
export interface Row {
  row: number
  trainer: string
  /** The release or the commit whose requests the tests replay. */
  release: string
  mode: string
  by: string[]
  note?: string
  absent?: string
  extra?: boolean
}

/** The document of `pytest test/contract --matrix FILE`. */
export interface Run {
  date: string
  cards: string | null
  torch: string
  tests: Record<
    string,
    { rows: number[], outcome: 'passed' | 'failed' | 'skipped', brings: string[], refused: string | null }
  >
}

interface Outcome {
  passed: number
  failed: number
  skipped: number
  brought: Set<string>
  refused: Set<string>
}

/** Tests that only assert refusals are listed and do not count. */
export function outcomeOf (row: Row, run: Run): Outcome {
  const outcome: Outcome = { passed: 0, failed: 0, skipped: 0, brought: new Set(), refused: new Set() }
  for (const test of Object.values(run.tests)) {
    if (!test.rows.includes(row.row)) continue
    if (test.refused !== null && test.outcome !== 'failed') {
      if (test.outcome === 'passed') outcome.refused.add(test.refused)
      continue
    }
    outcome[test.outcome]++
    if (test.outcome === 'passed') { for (const way of test.brings) outcome.brought.add(way) }
  }
  return outcome
}

/** No test of the row failed and, if the mode sends weights, a test that sends them passed. */
export function isPassed (row: Row, run: Run): boolean {
  const { passed, failed, brought } = outcomeOf(row, run)
  return failed === 0 && passed > 0 && (row.by.length === 0 || brought.size > 0)
}

/** Passed on one or several machines, with the carriers of the mode's weights. */
export function isOwn (row: Row, runs: readonly Run[]): boolean {
  const passed = runs.filter(run => isPassed(row, run))
  const brought = new Set(passed.flatMap(run => [...outcomeOf(row, run).brought]))
  return passed.length > 0 && runs.every(run => outcomeOf(row, run).failed === 0) &&
    row.by.every(way => brought.has(way))
}

export function cellOf (row: Row, run: Run | undefined): string {
  if (run === undefined) return ''
  const { passed, failed, skipped, brought, refused } = outcomeOf(row, run)
  if (failed > 0) return `**failed** (${failed} of ${passed + failed})`
  if (isPassed(row, run)) return brought.size === 0 ? 'passed' : `passed (${[...brought].sort().join(', ')})`
  if (skipped > 0) return 'needs GPUs'
  return refused.size > 0 ? 'refused' : 'no test'
}

const PAGES: Readonly<Record<string, string>> = { "vLLM's own client": '../vllm.md' }

export function pageOf (trainer: string): string {
  return PAGES[trainer] ?? `${trainer.toLowerCase()}.md`
}

/** Every row. */
export function fullTable (rows: readonly Row[], here: Run, cards?: Run): string {
  const runs = cards === undefined ? [here] : [here, cards]
  const head = [
    '#',
    'trainer / mode',
    'release',
    'weights by',
    `without GPUs, ${here.date}`,
    cards === undefined ? 'on GPUs' : `on ${cards.cards}, ${cards.date}`,
    'tests',
    'notes, and what is refused'
  ]
  const line = (row: Row): string[] => [
    row.extra === true ? `(${row.row})` : String(row.row),
    `[${row.trainer}](${pageOf(row.trainer)}) / ${row.mode}`,
    row.release,
    row.by.join(', '),
    row.absent === undefined ? cellOf(row, here) : 'not there',
    row.absent === undefined ? cellOf(row, cards) : '',
    testsOf(row, runs),
    row.absent ?? [row.note ?? '', ...refusedOf(row, runs)].filter(text => text !== '').join('; ')
  ]
  const lines = [head, head.map(() => '---'), ...rows.map(line)]
  return `${wrap(summary(rows, runs))}\n\n${lines.map(cells => `| ${cells.join(' | ')} |`).join('\n')}\n`
}

/** Prose has at most 120 columns. */
function wrap (text: string): string {
  return text.replace(/(.{1,120})(?: |$)/g, '$1\n').trimEnd()
}

/** The files of a row's tests, as links from docs/trainers. */
function testsOf (row: Row, runs: readonly Run[]): string {
  const named = runs.flatMap(({ tests }) =>
    Object.entries(tests).filter(([, { rows }]) => rows.includes(row.row)).map(([name]) => name.split('::', 1)[0]!)
  )
  const files = [...new Set(named)].sort()
  return files.map(file => `[${file.slice('test_'.length, -'.py'.length)}](../../test/contract/${file})`).join(', ')
}

function refusedOf (row: Row, runs: readonly Run[]): string[] {
  const all = new Set(runs.flatMap(run => [...outcomeOf(row, run).refused]))
  return [...all].map(what => `refused: ${what}`)
}

/** Rows beyond the matrix are not counted. */
export function summary (rows: readonly Row[], runs: readonly Run[]): string {
  const counted = rows.filter(row => row.extra !== true)
  const failed = counted.filter(row => runs.some(run => outcomeOf(row, run).failed > 0))
  const passed = counted.filter(row => !failed.includes(row) && runs.some(run => isPassed(row, run)))
  const own = passed.filter(row => isOwn(row, runs))
  const needing = counted.filter(row =>
    !failed.includes(row) && !passed.includes(row) && runs.some(run => outcomeOf(row, run).skipped > 0)
  )
  const others = counted.filter(row => ![...failed, ...passed, ...needing].includes(row))
  const list = (of: readonly Row[]): string => of.length === 0 ? '' : ` (${of.map(({ row }) => row).join(', ')})`
  const waiting = passed.filter(row => !own.includes(row))
  const parts = [
    `${passed.length} of ${counted.length} rows pass`,
    waiting.length === 0
      ? "all of them with what the trainer's own weights come by"
      : `${own.length} of them with what the trainer's own weights come by, ` +
        `${waiting.length} so far with what stands in for it${list(waiting)}: gloo for NCCL, shared memory for CUDA IPC`
  ]
  const rest = [[needing, 'needs GPUs', 'need GPUs'], [failed, 'fails', 'fail'], [
    others,
    'is refused or not there',
    'are refused or not there'
  ]] as const
  const told = rest.filter(([of]) => of.length > 0).map(([of, one, many]) =>
    `${of.length} ${of.length === 1 ? one : many}${list(of)}`
  )
  return `${parts.join(', ')}. ${told.length === 0 ? 'No row fails' : told.join('; ')}.`
}

/** The table for README: a line for each trainer. */
export function shortTable (rows: readonly Row[], here: Run, cards?: Run): string {
  const runs = cards === undefined ? [here] : [here, cards]
  const works = (row: Row): boolean =>
    runs.some(run => isPassed(row, run)) && runs.every(run => outcomeOf(row, run).failed === 0)
  const lines = [...new Set(rows.map(({ trainer }) => trainer))].map(trainer => {
    const own = rows.filter(row => row.trainer === trainer)
    const list = (of: readonly Row[]): string => of.map(({ mode }) => mode).join('; ')
    const page = join('docs/trainers', pageOf(trainer))
    return `| [${trainer}](${page}) | ${list(own.filter(works))} | ${list(own.filter(row => !works(row)))} |`
  })
  return `| trainer | modes that pass | not served, or not shown yet |\n| --- | --- | --- |\n${lines.join('\n')}\n`
}

export function readMatrix (root: string): { rows: Row[], here: Run, cards?: Run } {
  const read = (...path: string[]): unknown => JSON.parse(readFileSync(join(root, ...path), 'utf8'))
  const rows = read('test', 'contract', 'rows.json') as Row[]
  const here = read('bench', 'results', 'matrix.json') as Run
  try {
    return { rows, here, cards: read('bench', 'results', 'matrix-cards.json') as Run }
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw error
    return { rows, here }
  }
}

const BEGIN = '<!-- matrix -->\n'
const END = '<!-- /matrix -->'

/** Replaces the table between the marks of a page. Throws if the page has no marks. */
export function withTable (page: string, table: string): string {
  const [begin, end] = [page.indexOf(BEGIN), page.indexOf(END)]
  if (begin < 0 || end < begin) throw new Error(`there are no lines ${BEGIN.trim()} and ${END}`)
  return `${page.slice(0, begin + BEGIN.length)}${table}${page.slice(end)}`
}

/** The pages with the matrix by path, each with the table for its marks. */
export function matrixPages (root: string): Record<string, string> {
  const { rows, here, cards } = readMatrix(root)
  return { 'README.md': shortTable(rows, here, cards), 'docs/trainers/README.md': fullTable(rows, here, cards) }
}
