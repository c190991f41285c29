import { spawn, spawnSync } from 'node:child_process'
import { accessSync, constants, existsSync, mkdtempSync, readFileSync, readdirSync, rmSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { tmpdir } from 'node:os'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'

// npm run test:gpu [-- --only WORD ... --small --whole --no-sanitizer --no-build --jobs N --folder DIR]
// Everything that needs a card, without a network: every kernel's program against the CPU's kernels; the same, short, under
// compute-sanitizer's memcheck and racecheck; then the whole server (test/gpu/engine_test.py), which needs a Python with torch,
// transformers and safetensors ($REFIT_PYTHON, else build/venv/bin/python, else python3).
//   --only     tests whose name contains the word: kernels, memcheck, racecheck, numerics, update-is-fresh, sleep, robust, or longer
//   --small    leaves models of real sizes out; --whole adds the largest (61 GB)
//   --folder   where checkpoints are made instead of /dev/shm or the temporary folder
// In a folder that scripts/bundle.js made nothing is built.

const root = join(dirname(fileURLToPath(import.meta.url)), '..')
process.chdir(root)
const PROGRAMS = join('build', 'cuda', 'programs')
const LIMIT_MS = 300_000
const options = readOptions()
const began = Date.now()
/** { name, outcome: passed | failed | skipped, seconds, note } */
const rows = []

if (existsSync(join('scripts', 'build-native.js')) && !options['no-build']) run(process.execPath, [join('scripts', 'build-native.js'), '--cuda', '--cuda-tests'])
const programs = existsSync(PROGRAMS) ? readdirSync(PROGRAMS).filter(name => name.endsWith('_test')).sort() : []
if (programs.length === 0) fail(`${PROGRAMS} has no *_test: run "node scripts/build-native.js --cuda-tests" (it needs nvcc)`)

await together(programs.map(name => ({ name: `kernels/${name}`, command: [join(PROGRAMS, name)] })))
await sanitized()
await engine()
finish()

async function sanitized () {
  const tools = ['memcheck', 'racecheck']
  const tests = tools.flatMap(tool => programs.map(name => ({ name: `${tool}/${name}`, tool, program: join(PROGRAMS, name) }))).filter(({ name }) => wanted(name))
  if (tests.length === 0) return
  const sanitizer = options['no-sanitizer'] ? undefined : findSanitizer()
  if (sanitizer === undefined) {
    const outcome = options['no-sanitizer'] ? 'skipped' : 'failed'
    if (outcome === 'failed') console.error('\n!!!!! compute-sanitizer WAS NOT FOUND on PATH nor in /usr/local/cuda/bin: no kernel was checked. Install it (cuda-sanitizer), or say --no-sanitizer !!!!!\n')
    for (const { name } of tests) rows.push({ name, outcome, seconds: 0, note: outcome === 'skipped' ? '--no-sanitizer' : 'compute-sanitizer was not found' })
    return
  }
  await together(tests.map(({ name, tool, program }) => ({ name, command: [sanitizer, '--tool', tool, '--error-exitcode', '99', '--print-limit', '5', ...tool === 'memcheck' ? ['--report-api-errors', 'no'] : [], program, '--quick'] })))
}

async function engine () {
  if (options.only.length > 0 && options.only.every(word => /^(kernels|memcheck|racecheck)/.test(word))) return
  const python = process.env.REFIT_PYTHON ?? (existsSync(join('build', 'venv', 'bin', 'python')) ? join(root, 'build', 'venv', 'bin', 'python') : 'python3')
  const test = join('test', 'gpu', 'engine_test.py')
  const listed = spawnSync(python, [test, '--list'], { encoding: 'utf8' })
  if (listed.status !== 0) {
    rows.push({ name: 'engine', outcome: 'failed', seconds: 0, note: `${python} cannot run ${test}: ${lastLine(listed.stderr ?? listed.error?.message ?? '')}` })
    return
  }
  const chosen = listed.stdout.trim().split('\n').filter(wanted)
  if (chosen.length === 0) return
  const folder = mkdtempSync(join(tmpdir(), 'refit-test-gpu-'))
  const report = join(folder, 'report.json')
  const flags = [...options.only.flatMap(word => ['--only', word]), ...options.small ? ['--small'] : [], ...options.whole ? ['--whole'] : [], ...options.folder === undefined ? [] : ['--folder', options.folder]]
  const { status, signal } = spawnSync(python, ['-u', test, '--report', report, ...flags], { stdio: 'inherit' })
  if (existsSync(report)) rows.push(...JSON.parse(readFileSync(report, 'utf8')))
  else rows.push({ name: 'engine', outcome: 'failed', seconds: 0, note: `${test} ended with ${signal ?? status} and no report` })
  rmSync(folder, { recursive: true })
}

/** Runs tests, some at a time; what one says is shown when it has ended. */
async function together (tests) {
  const waiting = tests.filter(({ name }) => wanted(name))
  await Promise.all(Array.from({ length: options.jobs }, async () => {
    for (let test = waiting.shift(); test !== undefined; test = waiting.shift()) rows.push(await one(test))
  }))
}

async function one ({ name, command }) {
  const start = Date.now()
  const child = spawn(command[0], command.slice(1), { stdio: ['ignore', 'pipe', 'pipe'] })
  const said = []
  for (const stream of [child.stdout, child.stderr]) stream.on('data', chunk => said.push(chunk))
  const timer = setTimeout(() => child.kill('SIGKILL'), LIMIT_MS)
  const code = await new Promise(resolve => child.on('error', error => { said.push(Buffer.from(error.message)); resolve('no start') }).on('close', (code, signal) => resolve(code ?? signal)))
  clearTimeout(timer)
  const text = Buffer.concat(said).toString().trimEnd()
  const seconds = (Date.now() - start) / 1000
  const outcome = code === 0 ? 'passed' : 'failed'
  console.log(`--- ${name}: ${outcome} in ${seconds.toFixed(1)} s${code === 0 ? '' : ` (${code === 'SIGKILL' ? `still running after ${LIMIT_MS / 1000} s` : code})`}`)
  // Of what passed the last line is enough.
  console.log(code === 0 ? lastLine(text) : text.split('\n').slice(0, 120).join('\n'))
  return { name, outcome, seconds, note: code === 0 ? '' : `exit ${code}: ${lastLine(text)}` }
}

function finish () {
  console.log(`\n${cards()}`)
  for (const { name, outcome, seconds, note } of rows) console.log(`${outcome.padEnd(8)} ${seconds.toFixed(1).padStart(6)} s  ${name}${note === '' ? '' : `: ${note.slice(0, 300)}`}`)
  const count = outcome => rows.filter(row => row.outcome === outcome).length
  console.log(`${((Date.now() - began) / 1000).toFixed(0)} s in all\n${count('passed')} passed, ${count('failed')} failed, ${count('skipped')} skipped`)
  if (rows.length === 0) fail(`no test's name contains ${options.only.join(' or ')}`)
  process.exit(count('failed') === 0 && count('passed') > 0 ? 0 : 1)
}

function cards () {
  const { status, stdout } = spawnSync('nvidia-smi', ['--query-gpu=name,driver_version,memory.total', '--format=csv,noheader'], { encoding: 'utf8' })
  return status === 0 ? stdout.trim() : 'nvidia-smi does not tell what cards there are'
}

function findSanitizer () {
  for (const folder of [...(process.env.PATH ?? '').split(':'), '/usr/local/cuda/bin', '/usr/local/cuda/compute-sanitizer']) {
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
      options: { only: { type: 'string', multiple: true, default: [] }, small: flag, whole: flag, 'no-sanitizer': flag, 'no-build': flag, jobs: { type: 'string', default: '4' }, folder: { type: 'string' } }
    })
    const jobs = Number(values.jobs)
    if (!Number.isInteger(jobs) || jobs < 1) throw new Error(`--jobs: expected a number of 1 or more, got "${values.jobs}"`)
    return { ...values, jobs }
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
