import { spawnSync } from 'node:child_process'
import { existsSync, readdirSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

// npm run test:interop [-- --rounds 100]: refit against the real Python libraries. Tests are *.test.ts (which find the interpreter in $REFIT_PYTHON)
// and test_*.py (pytest, which gets the arguments). Needs a Python with torch, transformers, safetensors, openai and pytest.

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
const FOLDER = join('test', 'interop')
const python = process.env.REFIT_PYTHON ?? join(process.cwd(), 'build', 'venv', 'bin', 'python')
const libraries = 'torch transformers safetensors openai pytest'
if (spawnSync(python, ['-c', `import ${libraries.replaceAll(' ', ', ')}`], { stdio: 'inherit' }).status !== 0) {
  fail(`${python} does not have ${libraries}. Name another one in REFIT_PYTHON, or make it:\n` +
    `  python3 -m venv build/venv && build/venv/bin/pip install ${libraries}`)
}
const names = existsSync(FOLDER) ? readdirSync(FOLDER, { recursive: true, encoding: 'utf8' }) : []
const typescript = names.some(name => name.endsWith('.test.ts'))
const pytest = names.some(name => /(^|\/)test_[^/]*\.py$/.test(name))
if (!typescript && !pytest) fail(`there are no tests in ${FOLDER}`)

const env = { ...process.env, REFIT_PYTHON: python, REFIT_REQUIRE_INTEROP: '1' }
// One file after another: each may start a Python with torch, which takes memory and cores.
if (typescript) run(process.execPath, [join('scripts', 'test.js'), FOLDER, '--jobs=1'])
if (pytest) run(python, ['-m', 'pytest', '-q', FOLDER, ...process.argv.slice(2)])

function run (command, args) {
  const { status } = spawnSync(command, args, { stdio: 'inherit', env })
  if (status !== 0) process.exit(status ?? 1)
}

function fail (message) {
  console.error(`npm run test:interop: ${message}`)
  process.exit(1)
}
