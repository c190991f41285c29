import { spawnSync } from 'node:child_process'
import { existsSync, readdirSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { pythonWith } from './python.js'

// npm run test:interop [-- --rounds 100]: refit against the real Python libraries. test/interop: *.test.ts (which find the interpreter in
// $REFIT_PYTHON) and test_*.py (pytest, which gets the arguments); test/contract: what trainers ask (npm run matrix makes the table of it). Needs a
// Python with torch, transformers, safetensors, openai and pytest; with pytest-xdist two files run at a time, and without ray, zmq, zstandard and
// xxhash the tests that need those are skipped.

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
const FOLDER = join('test', 'interop')
const python = pythonWith(['torch', 'transformers', 'safetensors', 'openai', 'pytest'], 'test:interop')
const names = existsSync(FOLDER) ? readdirSync(FOLDER, { recursive: true, encoding: 'utf8' }) : []
if (!names.some(name => name.endsWith('.test.ts')) || !names.some(name => /(^|\/)test_[^/]*\.py$/.test(name))) {
  fail(`there are no tests in ${FOLDER}`)
}
const absent = ['xdist', 'ray', 'zmq', 'zstandard', 'xxhash'].filter(name =>
  spawnSync(python, ['-c', `import ${name}`], { stdio: 'ignore' }).status !== 0
)
if (absent.length > 0) {
  console.error(
    `!!!!! ${python} has no ${
      absent.join(', ')
    }: what needs them is skipped (pip install pytest-xdist ray pyzmq zstandard xxhash) !!!!!`
  )
}

const env = { ...process.env, REFIT_PYTHON: python, REFIT_REQUIRE_INTEROP: '1' }
const workers = absent.includes('xdist') ? [] : ['-n', '2', '--dist', 'loadfile']
// One file after another: each may start a Python with torch, which takes memory and cores.
run(process.execPath, [join('scripts', 'test.js'), FOLDER, '--jobs=1'])
// Two runs: each folder has a conftest.py of its own.
run(python, ['-m', 'pytest', '-q', ...workers, FOLDER, ...process.argv.slice(2)])
run(python, ['-m', 'pytest', '-q', ...workers, join('test', 'contract')])

function run (command, args) {
  const { status } = spawnSync(command, args, { stdio: 'inherit', env })
  if (status !== 0) process.exitCode = status ?? 1
}

function fail (message) {
  console.error(`npm run test:interop: ${message}`)
  process.exit(1)
}
