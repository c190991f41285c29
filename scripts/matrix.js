import { spawnSync } from 'node:child_process'
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { pythonWith } from './python.js'

// npm run matrix: runs the contract tests (test/contract), keeps their outcomes in bench/results/matrix.json, and
// writes the tables of README and docs/trainers from them. npm run matrix -- --results FILE [--results FILE]: runs
// nothing, and keeps the outcomes from a machine with GPUs (python3
// -m pytest test/contract --matrix FILE) in bench/results/matrix-cards.json. If several files have a test, the last one
// wins.

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
const RESULTS = join('bench', 'results')
const { values: { results = [] } } = parseArgs({ options: { results: { type: 'string', multiple: true } } })

if (results.length > 0) {
  const runs = results.map(file => JSON.parse(readFileSync(file, 'utf8')))
  const machines = [...new Set(runs.map(({ cards }) => cards))]
  if (machines.length > 1 || machines[0] === null) {
    fail(`expected results of one machine with cards, got ${machines.map(name => name ?? 'none').join(' and ')}`)
  }
  keep('matrix-cards.json', { ...runs.at(-1), tests: Object.assign({}, ...runs.map(({ tests }) => tests)) })
} else {
  const python = pythonWith(['torch', 'transformers', 'safetensors', 'pytest', 'zstandard', 'xxhash'], 'matrix')
  const file = join('build', 'matrix.json')
  mkdirSync('build', { recursive: true })
  // Without GPUs even if the machine has some: the results for GPUs are a file of their own.
  const { status } = spawnSync(python, ['-m', 'pytest', '-q', join('test', 'contract'), '--matrix', file], {
    stdio: 'inherit',
    env: { ...process.env, CUDA_VISIBLE_DEVICES: '' }
  })
  // Status 1: some tests failed. The table shows them.
  if (status !== 0 && status !== 1) fail(`pytest ended with ${status}`)
  keep('matrix.json', JSON.parse(readFileSync(file, 'utf8')))
  process.exitCode = status
}
if (spawnSync(process.execPath, [join('dist', 'scripts', 'write-docs.js')], { stdio: 'inherit' }).status !== 0) {
  fail('the tables were not written: npm run build:ts')
}

/** JSON with a line for each test, so diffs are readable. */
function keep (name, { tests, ...about }) {
  const lines = Object.entries(tests).sort(([a], [b]) => a < b ? -1 : 1).map(([test, known]) =>
    `    ${JSON.stringify(test)}: ${JSON.stringify(known)}`
  )
  const head = Object
    .entries(about)
    .map(([key, value]) => `  ${JSON.stringify(key)}: ${JSON.stringify(value)},\n`)
    .join('')
  writeFileSync(join(RESULTS, name), `{\n${head}  "tests": {\n${lines.join(',\n')}\n  }\n}\n`)
}

function fail (message) {
  console.error(`npm run matrix: ${message}`)
  process.exit(1)
}
