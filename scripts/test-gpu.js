import { spawnSync } from 'node:child_process'
import { accessSync, constants, existsSync, mkdtempSync, readFileSync, readdirSync, rmSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { tmpdir } from 'node:os'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { endTogether, runLimited, watchLeftovers } from './run-limited.js'

// npm run test:gpu [-- --only WORD ... --small --whole --no-sanitizer --no-build --jobs N --within SECONDS
//                     --folder DIR]
// Runs everything that needs a GPU, without a network: each kernel's program against the CPU's kernels; the server
// (test/gpu/engine_test.py), which needs a Python with torch, transformers and safetensors ($REFIT_PYTHON, else
// build/venv/bin/python, else python3); then short runs of the kernels' programs under compute-sanitizer's memcheck and
// racecheck.
//   --only     tests whose name contains the word: kernels, memcheck, racecheck, numerics, update-is-fresh, sleep,
//              robust, tensor, distributed, or a longer part of a name
//   --small    leaves models of real sizes out; --whole adds the largest (61 GB)
//   --within   starts no test after so many seconds; lists the tests that it leaves out, and does not succeed
//   --folder   for the checkpoints, instead of /dev/shm or the temporary folder
// In a folder from scripts/bundle.js nothing is built.

const root = join(dirname(fileURLToPath(import.meta.url)), '..')
process.chdir(root)
const PROGRAMS = join('build', 'cuda', 'programs')
const LIMIT_S = 300
const SANITIZER_LIMIT_S = 420
/** Tests that compare the free memory of a GPU before and after, or whose ranks spin for each other on one GPU. */
const ALONE = new Set([
  'all_reduce_test',
  'arena_test',
  'device_sets_test',
  'device_test',
  'fp16_all_reduce_test',
  'fp16_device_test',
  'group_test',
  'ipc_test',
  'nccl_test'
])
/** Programs for racecheck. It reports false races in kernels of cuBLASLt, so these use none. */
const OWN_KERNELS = { ...process.env, REFIT_CUBLASLT: 'off' }
/** Programs that mostly run NCCL, which the sanitizer does not know. */
const UNSANITIZED = new Set(['group_test'])
/** The time limit for the tests of the whole server, which have limits of their own. */
const ENGINE_LIMIT_S = 3600
/** The exit status of the server's tests if no name contains a word of --only. */
const NOTHING_CHOSEN = 3
const OUT_OF_TIME = 'not run: no time left'
const options = readOptions()
const began = Date.now()
/** { name, outcome: passed | failed | skipped, seconds, note } */
const rows = []
const leftBehind = watchLeftovers()
let report
endTogether(signal => {
  finish(`ended by ${signal}`)
})

if (existsSync(join('scripts', 'build-native.js')) && !options['no-build']) {
  run(process.execPath, [join('scripts', 'build-native.js'), '--cuda', '--cuda-tests'])
}
const programs = existsSync(PROGRAMS) ? readdirSync(PROGRAMS).filter(name => name.endsWith('_test')).sort() : []
if (programs.length === 0) {
  fail(`${PROGRAMS} has no *_test: run "node scripts/build-native.js --cuda-tests" (it needs nvcc)`)
}

await together(programs.map(name => ({ name: `kernels/${name}`, command: [join(PROGRAMS, name)], limit: LIMIT_S })))
await engine()
await sanitized()
process.exit(finish() ? 0 : 1)

async function sanitized () {
  const tools = ['memcheck', 'racecheck']
  const tests = tools
    .flatMap(tool =>
      programs.filter(name => !UNSANITIZED.has(name)).map(name => ({
        name: `${tool}/${name}`,
        tool,
        program: join(PROGRAMS, name)
      }))
    )
    .filter(({ name }) => wanted(name))
  if (tests.length === 0) return
  const sanitizer = options['no-sanitizer'] ? undefined : findSanitizer()
  if (sanitizer === undefined) {
    const outcome = options['no-sanitizer'] ? 'skipped' : 'failed'
    if (outcome === 'failed') {
      console.error(
        '\n!!!!! compute-sanitizer WAS NOT FOUND on PATH nor in /usr/local/cuda/bin: no kernel was checked. ' +
          'Install it (cuda-sanitizer), or pass --no-sanitizer !!!!!\n'
      )
    }
    for (const { name } of tests) {
      rows.push({
        name,
        outcome,
        seconds: 0,
        note: outcome === 'skipped' ? '--no-sanitizer' : 'compute-sanitizer was not found'
      })
    }
    return
  }
  await together(
    tests.map(({ name, tool, program }) => ({
      name,
      limit: SANITIZER_LIMIT_S,
      env: tool === 'racecheck' ? OWN_KERNELS : process.env,
      command: [
        sanitizer,
        '--tool',
        tool,
        '--error-exitcode',
        '99',
        '--print-limit',
        '5',
        ...tool === 'memcheck' ? ['--report-api-errors', 'no'] : [],
        program,
        '--quick'
      ]
    }))
  )
}

async function engine () {
  if (options.only.length > 0 && options.only.every(word => /^(kernels|memcheck|racecheck)/.test(word))) return
  const python = process.env.REFIT_PYTHON ??
    (existsSync(join('build', 'venv', 'bin', 'python')) ? join(root, 'build', 'venv', 'bin', 'python') : 'python3')
  const test = join('test', 'gpu', 'engine_test.py')
  const left = secondsLeft()
  if (left <= 0) return rows.push(outOfTime('engine'))
  const folder = mkdtempSync(join(tmpdir(), 'refit-test-gpu-'))
  report = join(folder, 'report.json')
  const flags = [
    ...Number.isFinite(left) ? ['--within', Math.ceil(left)] : [],
    ...options.only.flatMap(word => ['--only', word]),
    ...options.small ? ['--small'] : [],
    ...options.whole ? ['--whole'] : [],
    ...options.folder === undefined ? [] : ['--folder', options.folder]
  ]
  const { code, late } = await runLimited([python, '-u', test, '--report', report, ...flags.map(String)], {
    seconds: Math.min(ENGINE_LIMIT_S, left + LIMIT_S),
    show: true
  })
  const told = readReport()
  rows.push(...told)
  const isChosen = code !== NOTHING_CHOSEN || told.length > 0
  if (late || (isChosen && code !== 0 && !told.some(({ outcome }) => outcome === 'failed'))) {
    rows.push({
      name: 'engine',
      outcome: 'failed',
      seconds: 0,
      note: `${python} ${test} ended with ${code}${late ? ', out of time' : ''}, and told of ${told.length} tests`
    })
  }
  rmSync(folder, { recursive: true })
}

/** The results of the server's tests so far, each once. */
function readReport () {
  const told = report !== undefined && existsSync(report) ? JSON.parse(readFileSync(report, 'utf8')) : []
  report = undefined
  return told
}

/** Runs tests, some at a time. The output of each is shown when it has ended. */
async function together (tests) {
  const chosen = tests.filter(({ name }) => wanted(name))
  for (const test of chosen.filter(({ name }) => ALONE.has(programOf(name)))) rows.push(await one(test))
  const waiting = chosen.filter(({ name }) => !ALONE.has(programOf(name)))
  await Promise.all(Array.from({ length: options.jobs }, async () => {
    for (let test = waiting.shift(); test !== undefined; test = waiting.shift()) rows.push(await one(test))
  }))
}

function programOf (name) {
  return name.slice(name.lastIndexOf('/') + 1)
}

async function one ({ name, command, limit, env }) {
  if (secondsLeft() <= 0) return outOfTime(name)
  const { code, text, seconds, late } = await runLimited(command, { seconds: limit, env })
  const outcome = code === 0 ? 'passed' : 'failed'
  const why = late ? `still running after ${limit} s` : `exit ${code}`
  console.log(`--- ${name}: ${outcome} in ${seconds.toFixed(1)} s${code === 0 ? '' : ` (${why})`}`)
  // Only the last line of a test that passed.
  console.log(code === 0 ? lastLine(text) : text.split('\n').slice(0, 120).join('\n'))
  return { name, outcome, seconds, note: code === 0 ? '' : `${why}: ${lastLine(text)}` }
}

function secondsLeft () {
  return options.within - (Date.now() - began) / 1000
}

function outOfTime (name) {
  return { name, outcome: 'skipped', seconds: 0, note: OUT_OF_TIME }
}

/** Prints all results. Returns whether every requested test ran and passed. */
function finish (ended = '') {
  rows.push(...readReport())
  const left = leftBehind()
  if (left.length > 0) {
    rows.push({
      name: 'left-behind',
      outcome: 'failed',
      seconds: 0,
      note: `${left.join(', ')}: a test was killed or forgot it; removed`
    })
  }
  if (ended !== '') {
    rows.push({
      name: 'test:gpu',
      outcome: 'failed',
      seconds: 0,
      note: `${ended}; what is not in this table was not run`
    })
  }
  console.log(`\n${cards()}`)
  for (const { name, outcome, seconds, note } of rows) {
    console.log(`${(outcome === 'passed' ? outcome : outcome.toUpperCase()).padEnd(8)} ${
      seconds
        .toFixed(1)
        .padStart(6)
    } s  ${name}${note === '' ? '' : `: ${note.slice(0, outcome === 'failed' ? 900 : 300)}`}`)
  }
  const count = outcome => rows.filter(row => row.outcome === outcome).length
  const forTime = rows.filter(({ note }) => note === OUT_OF_TIME).length
  console.log(
    `${((Date.now() - began) / 1000).toFixed(0)} s in all\n${count('passed')} passed, ${count('failed')} failed, ${
      count('skipped')
    } skipped`
  )
  if (forTime > 0) console.log(`!!!!! ${forTime} OF THEM WERE NOT RUN: --within ${options.within} s was over !!!!!`)
  if (rows.length === 0) fail(`no test's name contains ${options.only.join(' or ')}`)
  return count('failed') === 0 && count('passed') > 0 && forTime === 0
}

function cards () {
  const { status, stdout } = spawnSync('nvidia-smi', [
    '--query-gpu=name,driver_version,memory.total',
    '--format=csv,noheader'
  ], { encoding: 'utf8' })
  return status === 0 ? stdout.trim() : 'nvidia-smi does not tell what cards there are'
}

function findSanitizer () {
  for (
    const folder of [...(process.env.PATH ?? '').split(':'), '/usr/local/cuda/bin', '/usr/local/cuda/compute-sanitizer']
  ) {
    const path = join(folder, 'compute-sanitizer')
    try {
      accessSync(path, constants.X_OK)
      return path
    } catch {}
  }
  return undefined
}

function wanted (name) {
  return options.only.length === 0 || options.only.some(word => name.includes(word))
}

function readOptions () {
  const flag = { type: 'boolean', default: false }
  try {
    const { values } = parseArgs({
      options: {
        only: { type: 'string', multiple: true, default: [] },
        small: flag,
        whole: flag,
        'no-sanitizer': flag,
        'no-build': flag,
        jobs: { type: 'string', default: '4' },
        within: { type: 'string', default: 'Infinity' },
        folder: { type: 'string' }
      }
    })
    const jobs = Number(values.jobs)
    if (!Number.isInteger(jobs) || jobs < 1) {
      throw new Error(`--jobs: expected a number of 1 or more, got "${values.jobs}"`)
    }
    const within = Number(values.within)
    if (!(within > 0)) throw new Error(`--within: expected seconds, got "${values.within}"`)
    return { ...values, jobs, within }
  } catch (error) {
    return fail(error.message)
  }
}

function lastLine (text) {
  return text.trimEnd().split('\n').at(-1) ?? ''
}

function run (command, args) {
  const { status } = spawnSync(command, args, { stdio: 'inherit' })
  if (status !== 0) process.exit(status ?? 1)
}

function fail (message) {
  console.error(`npm run test:gpu: ${message}`)
  process.exit(1)
}
