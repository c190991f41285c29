import { spawnSync } from 'node:child_process'
import { existsSync, rmSync } from 'node:fs'
import { availableParallelism } from 'node:os'
import { dirname, join, resolve } from 'node:path'
import { fileURLToPath, pathToFileURL } from 'node:url'
import { parseArgs } from 'node:util'
import { judge } from './mutants/judge.js'
import { NativeWorkspace } from './mutants/native-workspace.js'
import { report, summary } from './mutants/report.js'
import { Workspace } from './mutants/workspace.js'

// npm run test:mutants [-- --only WORD --jobs N --shard 1/4]
// Plants the bugs of test/mutants one at a time in a copy of the compiled tests, or of native/, runs the tests that
// should notice each, and reports the bugs that no test noticed. The checkout is only read. Fails if less than 95 % are
// caught, or if a row of the table cannot be judged.

const ENOUGH = 0.95
const ROOT = join(dirname(fileURLToPath(import.meta.url)), '..')
process.chdir(ROOT)
const options = readOptions()

// Builds the addon, compiles the tests, and checks the table.
const { status } = spawnSync(process.execPath, [join('scripts', 'test.js'), 'test/mutants'], { stdio: 'inherit' })
if (status !== 0) fail('the tests could not be compiled, or the table of mutants is wrong (see above)')

const { AREAS } = await import(pathToFileURL(resolve('build/test/test/mutants/index.js')).href)
const chosen = choose(Object.entries(AREAS).flatMap(([area, rows]) => rows.map(row => ({ area, ...row }))))
if (chosen.length === 0) fail(`no mutant matches --only ${options.only}`)

const folder = join(ROOT, 'build', 'mutants')
rmSync(folder, { recursive: true, force: true })
const began = performance.now()
const results = await judgeAll(chosen)
console.log(summary(results, (performance.now() - began) / 1000))
const judged = results.filter(({ outcome }) => outcome !== 'skipped')
const caught = judged.filter(({ outcome }) => outcome === 'caught').length
const isWrong = results.some(({ outcome }) => outcome === 'error')
process.exit(isWrong || caught < judged.length * ENOUGH ? 1 : 0)

/** Judges TypeScript in `jobs` workspaces. Native code has one workspace, because its build uses all cores. */
async function judgeAll (mutants) {
  const results = []
  const isNative = ({ file }) => file.startsWith('native/')
  const passed = new Map()
  const work = async (queue, makeWorkspace) => {
    let workspace
    for (let mutant; (mutant = queue.shift()) !== undefined;) {
      workspace ??= makeWorkspace()
      const result = { ...mutant, ...await judge(mutant, workspace, passed) }
      results.push(result)
      console.log(report(result))
    }
  }
  const scripts = mutants.filter(mutant => !isNative(mutant))
  const natives = mutants.filter(isNative)
  const workers = Array.from(
    { length: Math.min(options.jobs, scripts.length) },
    async (_, number) => await work(scripts, () => new Workspace(ROOT, join(folder, `typescript-${number + 1}`)))
  )
  // With one job, native code waits for its turn.
  if (options.jobs === 1) await Promise.all(workers)
  await Promise.all([...workers, work(natives, () => new NativeWorkspace(ROOT, join(folder, 'native')))])
  return results
}

function choose (mutants) {
  const { only, shard: [number, of] } = options
  return mutants
    .filter(({ area, file, why }) => only === undefined || [area, file, why].some(text => text.includes(only)))
    .filter((_, index) => index % of === number - 1)
}

function readOptions () {
  let values
  try {
    values = parseArgs({ options: { only: { type: 'string' }, jobs: { type: 'string' }, shard: { type: 'string' } } })
      .values
  } catch (error) {
    fail(`${error.message}; expected --only WORD, --jobs N or --shard 1/4`)
  }
  const jobs = Number(values.jobs ?? Math.min(availableParallelism(), 4))
  if (!Number.isInteger(jobs) || jobs < 1) fail(`--jobs: expected a number of 1 or more, got "${values.jobs}"`)
  const shard = /^(\d+)\/(\d+)$/.exec(values.shard ?? '1/1')?.slice(1).map(Number)
  if (shard === undefined || shard[0] < 1 || shard[0] > shard[1]) {
    fail(`--shard: expected a part like 1/4, got "${values.shard}"`)
  }
  if (!existsSync('node_modules')) fail('node_modules is missing: run "npm ci"')
  return { only: values.only, jobs, shard }
}

function fail (message) {
  console.error(`test:mutants: ${message}`)
  process.exit(1)
}
