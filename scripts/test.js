import { spawnSync } from 'node:child_process'
import { appendFileSync, cpSync, existsSync, readFileSync, readdirSync, rmSync, statSync, writeFileSync } from 'node:fs'
import { availableParallelism } from 'node:os'
import { dirname, join, relative, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { joinModules } from './join-modules.js'
import { runTests } from './run-tests.js'

// npm test [-- test/folder test/file.test.ts --jobs=2 --timeout=300]
// Compiles what has changed into build/test and runs the compiled tests. This checks the types, and worker threads
// start in milliseconds, unlike under a TypeScript loader. A run without tests fails, and so does a file without
// assertions. With --coverage, or other options of tap, tap's runner runs them.
// Many files are joined into build/joined first (join-modules.js), and these run.

const root = join(dirname(fileURLToPath(import.meta.url)), '..')
process.chdir(root)
const OUT = join('build', 'test')
const JOINED = join('build', 'joined')
/** Joining takes as long as fewer files save. */
const JOIN_FROM = 20
const RESULTS = join('build', 'test-results.tap')
/** Tests that run by name only: they need a Python with torch, a GPU, a browser or a registry. */
const APART = ['interop', 'browser', 'gpu', 'package', 'fixtures', 'helpers']

const options = process.argv.slice(2).filter(argument => argument.startsWith('-'))
const named = process.argv.slice(2).filter(argument => !argument.startsWith('-'))
const sources = (named.length > 0 ? named : ['test']).flatMap(path => find(resolve(path), named.length > 0))
if (sources.length === 0) fail(`no test files in ${named.join(', ') || 'test'}`)

run(process.execPath, [join('scripts', 'build-native.js'), '--faults'])
compile()

const compiled = sources.map(source => join(OUT, relative(root, source).replace(/\.ts$/, '.js')))
for (const file of compiled) {
  if (!existsSync(file)) fail(`${file} was not compiled: does tsconfig.test.json include it?`)
}
const status = options.every(option => /^--(jobs|timeout)=\d+$/.test(option)) ? await runHere() : runByTap()
const counts = count(readFileSync(RESULTS, 'utf8'))
for (const file of compiled.filter(file => !counts.files.has(file))) {
  console.error(`npm test: ${file} ran no test`)
  counts.failed++
}
if (status !== 0 && counts.failed === 0) counts.failed = 1
console.log(
  `${counts.passed} passed, ${counts.failed} failed${counts.skipped > 0 ? `, ${counts.skipped} skipped` : ''}`
)
process.exit(counts.failed === 0 ? 0 : 1)

function find (path, isNamed) {
  if (!existsSync(path)) fail(`${path} does not exist`)
  if (statSync(path).isFile()) return path.endsWith('.test.ts') ? [path] : []
  return readdirSync(path, { withFileTypes: true }).flatMap(entry => {
    if (entry.isDirectory() && !isNamed && APART.includes(entry.name)) return []
    return find(join(path, entry.name), isNamed)
  })
}

/** Compiles the TypeScript that has changed, and copies the other files of test/, which tests read or start by path. */
function compile () {
  run(process.execPath, [join('node_modules', 'typescript-7', 'bin', 'tsc'), '-p', 'tsconfig.test.json'])
  // The compiler keeps the output of deleted sources.
  for (const entry of readdirSync(OUT, { recursive: true, withFileTypes: true })) {
    const path = join(entry.parentPath, entry.name)
    const source = relative(OUT, path)
    const isOutput = existsSync(source.replace(/\.js(\.map)?$/, '.ts')) || existsSync(source)
    if (entry.isFile() && !isOutput && entry.name !== '.tsbuildinfo') rmSync(path)
  }
  cpSync('test', join(OUT, 'test'), { recursive: true, filter: path => !/\.ts$|__pycache__/.test(path) })
}

async function runHere () {
  const number = (name, otherwise) =>
    Number(options.find(option => option.startsWith(`--${name}=`))?.split('=')[1] ?? otherwise)
  // One more than the cores, because a test also waits, for processes and timers. More wait for each other's cores.
  const jobs = Math.max(1, number('jobs', Math.min(availableParallelism() + 1, 4)))
  writeFileSync(RESULTS, '')
  const isJoined = compiled.length >= JOIN_FROM
  if (isJoined) await joinTests()
  await runTests(compiled, {
    jobs,
    root: isJoined ? JOINED : OUT,
    seconds: number('timeout', 300),
    onEnd: tap => {
      appendFileSync(RESULTS, tap)
      print(tap)
    }
  })
  return 0
}

/** The packages that stay apart are loaded by few files, or find their own files by their paths. */
async function joinTests () {
  rmSync(JOINED, { recursive: true, force: true })
  const workers = readdirSync(join(OUT, 'test'), { recursive: true }).filter(name => /-(worker|poller)\.js$/.test(name))
  await joinModules(OUT, JOINED, {
    entries: [...compiled.map(file => relative(OUT, file)), ...workers.map(name => join('test', name))],
    external: ['tap', 'eslint', 'typescript']
  })
}

function runByTap () {
  const coverage = options.includes('--coverage') ? [] : ['--disable-coverage']
  // A terminal gets tap's display. Elsewhere tap would repaint it line after line, so the results are read from the
  // file.
  const { status } = spawnSync(process.execPath, [
    join('node_modules', 'tap', 'dist', 'esm', 'run.mjs'),
    ...coverage,
    `--output-file=${RESULTS}`,
    ...options.filter(option => option !== '--coverage'),
    ...compiled
  ], { stdio: ['inherit', process.stdout.isTTY ? 'inherit' : 'ignore', 'inherit'] })
  if (!process.stdout.isTTY) print(readFileSync(RESULTS, 'utf8'))
  return status
}

/** Prints one line for each file. If a file failed, also all of it except the assertions that passed. */
function print (tap) {
  for (const section of tap.split(/^(?=# Subtest: )/m)) {
    const name = /^# Subtest: (.*)/.exec(section)?.[1]
    if (name === undefined) continue
    const [, not, ms] = /^(not )?ok \d+ - .*?(?:# time=([\d.]+)ms)?$/m.exec(section) ?? [undefined, 'not ', undefined]
    console.log(
      `${not === undefined ? 'ok    ' : 'FAILED'} ${name}${ms === undefined ? '' : ` (${(ms / 1000).toFixed(1)} s)`}`
    )
    if (not !== undefined) {
      console.log(section.split('\n').filter(line => line.trim() !== '' && !/^ +(ok \d|1\.\.\d)/.test(line)).join('\n'))
    }
  }
}

/** Counts tests (the named ones, not assertions) by outcome, and assertions by file. */
function count (tap) {
  const files = new Map()
  let file
  let passed = 0
  let failed = 0
  let skipped = 0
  let before = 0
  for (const line of tap.split('\n')) {
    const subtest = /^# Subtest: (.+)$/.exec(line)
    if (subtest !== null) file = subtest[1]
    // A file that failed although none of its tests did: it crashed, or ran into its time limit.
    if (/^not ok \d/.test(line) && failed === before) failed++
    if (/^(not )?ok \d/.test(line)) before = failed
    const point = /^( +)(not )?ok \d+/.exec(line)
    if (point === null) continue
    if (file !== undefined) files.set(file, (files.get(file) ?? 0) + 1)
    if (point[1].length !== 4) continue
    if (/# (SKIP|TODO)/i.test(line)) skipped++
    else if (point[2] === undefined) passed++
    else failed++
  }
  return { files, passed, failed, skipped }
}

function run (command, args) {
  const { status, signal } = spawnSync(command, args, { stdio: 'inherit' })
  if (status !== 0) fail(`${args.join(' ')} failed (${signal ?? status})`)
}

function fail (message) {
  console.error(`npm test: ${message}`)
  process.exit(1)
}
