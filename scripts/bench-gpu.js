import { spawnSync } from 'node:child_process'
import { existsSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { tmpdir } from 'node:os'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'

// npm run bench:gpu [-- --only WORD ... --tp N --model qwen3-8b --layers N --folder DIR --results DIR --name NAME --no-build]
// Figures of a card, each beside what it is compared with in the same run: the native programs (native/bench_gpu), then the whole
// server (bench/gpu/server_bench.py: load, memory, decode-1, decode-64). Keeps them in bench/results/<date>-<card>-<name>.md.
// Needs a Python with torch, transformers and safetensors ($REFIT_PYTHON, else build/venv/bin/python, else python3).
//   --only     parts whose name contains the word: native, scatter, checksum, disk, server, load, memory, decode-1, decode-64
//   --folder   where the checkpoint (16.4 GB) is made instead of /dev/shm or the temporary folder

const root = join(dirname(fileURLToPath(import.meta.url)), '..')
process.chdir(root)
const PROGRAMS = join('build', 'cuda', 'programs')
const SERVER_PARTS = ['load', 'memory', 'decode-1', 'decode-64']
const options = readOptions()
const python = process.env.REFIT_PYTHON ?? (existsSync(join('build', 'venv', 'bin', 'python')) ? join(root, 'build', 'venv', 'bin', 'python') : 'python3')

const card = ask('nvidia-smi', ['--query-gpu=name,driver_version', '--format=csv,noheader']).split('\n')
const [cardName, driver] = card[0].split(', ')
const libraries = ask(python, ['-c', 'import torch, transformers, safetensors; print(f"CUDA {torch.version.cuda} · torch {torch.__version__}, transformers {transformers.__version__}, safetensors {safetensors.__version__}")'])
if (existsSync(join('scripts', 'build-native.js')) && !options['no-build']) run(process.execPath, [join('scripts', 'build-native.js'), '--cuda', '--cuda-tests'])
if (!existsSync(join('build', 'probe', 'bandwidth'))) run(python, [join('native', 'probe', 'run.py'), '--build'])

const sections = []
let failures = 0
const programs = existsSync(PROGRAMS) ? readdirSync(PROGRAMS).filter(name => name.endsWith('_bench')).sort() : []
if (programs.length === 0) fail(`${PROGRAMS} has no *_bench: run "node scripts/build-native.js --cuda-tests" (it needs nvcc)`)
for (const name of programs.filter(name => wanted('native') || wanted(name))) native(name)
const parts = SERVER_PARTS.filter(part => wanted('server') || wanted(part))
if (parts.length > 0) server(parts)
if (sections.length === 0) fail(`no part's name contains ${options.only.join(' or ')}: there are ${[...programs, ...SERVER_PARTS].join(', ')}`)
keep()
process.exit(failures === 0 ? 0 : 1)

function native (name) {
  console.log(`--- ${name}`)
  const { status, signal, stdout, stderr } = spawnSync(join(PROGRAMS, name), { encoding: 'utf8', maxBuffer: 64 << 20 })
  process.stdout.write(stdout)
  process.stderr.write(stderr)
  if (status !== 0) failures++
  const lines = stdout.trimEnd().split('\n')
  const isTable = lines.some(line => line.startsWith('| '))
  const text = isTable ? lines.join('\n') : '```\n' + lines.join('\n') + '\n```'
  sections.push(`## ${name}\n\n${text}${status === 0 ? '' : `\n\nFAILED (${signal ?? status}): ${stderr.trim().split('\n').at(-1)}`}`)
}

function server (parts) {
  const folder = mkdtempSync(join(tmpdir(), 'refit-bench-gpu-'))
  const rows = join(folder, 'rows.md')
  const flags = ['tp', 'model', 'layers', 'folder'].flatMap(name => options[name] === undefined ? [] : [`--${name}`, options[name]])
  const { status, signal } = spawnSync(python, ['-u', join('bench', 'gpu', 'server_bench.py'), '--out', rows, ...flags, ...parts.flatMap(part => ['--only', part])], { stdio: 'inherit' })
  if (status !== 0) failures++
  const table = existsSync(rows) ? readFileSync(rows, 'utf8').trimEnd() : `| all | FAILED (${signal ?? status}) | | | | NO |`
  sections.push(`## Server: ${options.model ?? 'qwen3-8b'} shape, random weights\n\n| figure | refit | compared with | ratio | goal | reached |\n| --- | --- | --- | --- | --- | --- |\n${table}`)
  rmSync(folder, { recursive: true })
}

function keep () {
  const date = new Date().toISOString().slice(0, 10)
  const slug = `${card.length > 1 ? `${card.length}x-` : ''}${cardName.toLowerCase().replace(/[^a-z0-9]+/g, '-')}`
  const command = ['npm run bench:gpu', ...process.argv.length > 2 ? ['--', ...process.argv.slice(2)] : []].join(' ')
  const { version } = JSON.parse(readFileSync('package.json', 'utf8'))
  const head = `${date} · ${card.length} x ${cardName} · driver ${driver} · ${libraries} · refit ${version}, Node ${process.versions.node} · \`${command}\``
  const file = join(options.results, `${date}-${slug}-${options.name}.md`)
  mkdirSync(options.results, { recursive: true })
  writeFileSync(file, `# ${options.name}\n\n${head}\n\n${sections.join('\n\n')}\n`)
  console.log(`\n${head}\n\n${sections.join('\n\n')}\n\nkept in ${file}`)
}

function wanted (name) {
  return options.only.length === 0 || options.only.some(word => name.includes(word))
}

function ask (command, args) {
  const { status, stdout, stderr, error } = spawnSync(command, args, { encoding: 'utf8' })
  if (status !== 0) fail(`${command} ${args[0]} failed: ${error?.message ?? stderr.trim().split('\n').at(-1)}`)
  return stdout.trim()
}

function readOptions () {
  const text = { type: 'string' }
  try {
    return parseArgs({
      options: { only: { type: 'string', multiple: true, default: [] }, tp: text, model: text, layers: text, folder: text, results: { type: 'string', default: join('bench', 'results') }, name: { type: 'string', default: 'gpu' }, 'no-build': { type: 'boolean', default: false } }
    }).values
  } catch (error) {
    return fail(error.message)
  }
}

function run (command, args) {
  const { status } = spawnSync(command, args, { stdio: 'inherit' })
  if (status !== 0) process.exit(status ?? 1)
}

function fail (message) {
  console.error(`npm run bench:gpu: ${message}`)
  process.exit(1)
}
