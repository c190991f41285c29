import { spawnSync } from 'node:child_process'
import { existsSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { tmpdir } from 'node:os'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { endTogether, runLimited, watchLeftovers } from './run-limited.js'

// npm run bench:gpu [-- --only WORD ... --tp N --model qwen3-8b --layers N --folder DIR --results DIR --name NAME
//                      --no-build]
// Measures a GPU, and in the same run what each figure is compared with: the native programs (native/bench_gpu; one,
// profile_bench, shows the kernels of steps), updates from tensors (bench/gpu/tensor_bench.py) and from process groups
// (bench/gpu/distributed_bench.py, which needs two or three GPUs), then the server (bench/gpu/server_bench.py: load,
// memory, decode-1, decode-64) and adapters (bench/gpu/adapter_bench.py) and, on two GPUs, a trainer's shards
// (bench/gpu/shards_bench.py). Rewrites bench/results/<date>-<gpu>-<name>.md after each part.
// Needs a Python with torch, transformers and safetensors ($REFIT_PYTHON, else build/venv/bin/python, else python3).
//   --only     parts whose name contains the word: native, scatter, checksum, disk, adapters, profile, tensor,
//              tensor-empty, tensor-pooled, tensor-ordinary, tensor-buckets, tensor-kept, tensor-30b, server, load,
//              memory, decode-1, decode-64, adapter-throughput, adapter-replace, shards, shards-nccl
//   --model    of the Python programs; or 8b, 30b or 1.5b of profile_bench
//   --folder   for the checkpoint (16.4 GB) instead of /dev/shm or the temporary folder

const root = join(dirname(fileURLToPath(import.meta.url)), '..')
process.chdir(root)
const PROGRAMS = join('build', 'cuda', 'programs')
const SERVER_PARTS = ['load', 'memory', 'decode-1', 'decode-64']
const TENSOR_PARTS = ['tensor-empty', 'tensor-pooled', 'tensor-ordinary', 'tensor-buckets', 'tensor-kept', 'tensor-30b']
const ADAPTER_PARTS = ['adapter-throughput', 'adapter-replace']
const PROFILE_MODELS = ['8b', '30b', '1.5b']
const SHARD_PARTS = ['shards', 'shards-nccl']
const DISTRIBUTED_PARTS = [
  'distributed-empty',
  'distributed-init',
  'distributed-bucket',
  'distributed-buckets',
  'distributed-each',
  'distributed-tp2'
]
const NATIVE_LIMIT_S = 300
const SERVER_LIMIT_S = 3000
const options = readOptions()
const python = process.env.REFIT_PYTHON ??
  (existsSync(join('build', 'venv', 'bin', 'python')) ? join(root, 'build', 'venv', 'bin', 'python') : 'python3')

const card = ask('nvidia-smi', ['--query-gpu=name,driver_version', '--format=csv,noheader']).split('\n')
const [cardName, driver] = card[0].split(', ')
const libraries = ask(python, [
  '-c',
  'import torch, transformers, safetensors; print(f"CUDA {torch.version.cuda} · torch {torch.__version__}, ' +
  'transformers {transformers.__version__}, safetensors {safetensors.__version__}")'
])
if (existsSync(join('scripts', 'build-native.js')) && !options['no-build']) {
  run(process.execPath, [join('scripts', 'build-native.js'), '--cuda', '--cuda-tests'])
}
if (!existsSync(join('build', 'probe', 'bandwidth'))) run(python, [join('native', 'probe', 'run.py'), '--build'])

const date = new Date().toISOString().slice(0, 10)
const sections = []
let failures = 0
const programs = existsSync(PROGRAMS) ? readdirSync(PROGRAMS).filter(name => name.endsWith('_bench')).sort() : []
if (programs.length === 0) {
  fail(`${PROGRAMS} has no *_bench: run "node scripts/build-native.js --cuda-tests" (it needs nvcc)`)
}
const leftBehind = watchLeftovers()
let underWay
endTogether(signal => {
  if (underWay !== undefined) sections.push(tableOf(underWay))
  sections.push(`ENDED by ${signal}: what is not here was not run`)
  keep()
})
for (const name of programs.filter(name => wanted('native') || wanted(name))) await native(name)
await pythonParts(TENSOR_PARTS.filter(wanted), 'tensor_bench.py', 'Updates from tensors, whole requests', [
  'model',
  'layers',
  'folder'
])
await pythonParts(
  DISTRIBUTED_PARTS.filter(wanted),
  'distributed_bench.py',
  'Updates from process groups, whole requests',
  ['model', 'layers', 'folder']
)
await pythonParts(
  SERVER_PARTS.filter(part => wanted('server') || wanted(part)),
  'server_bench.py',
  `Server: ${options.model ?? 'qwen3-8b'} shape, random weights`,
  ['tp', 'model', 'layers', 'folder']
)
await pythonParts(ADAPTER_PARTS.filter(wanted), 'adapter_bench.py', 'LoRA adapters: whole server, random weights', [
  'tp',
  'model',
  'layers',
  'folder'
])
await pythonParts(SHARD_PARTS.filter(wanted), 'shards_bench.py', "Updates from a trainer's shards, two GPUs", [
  'model',
  'layers',
  'folder'
])
if (sections.length === 0) {
  fail(
    `no part's name contains ${options.only.join(' or ')}: there are ${
      [...programs, ...TENSOR_PARTS, ...DISTRIBUTED_PARTS, ...SERVER_PARTS, ...ADAPTER_PARTS, ...SHARD_PARTS].join(', ')
    }`
  )
}
for (const path of leftBehind()) console.log(`!!!!! ${path} was left behind; removed !!!!!`)
console.log(`\n${head()}\n\n${sections.join('\n\n')}\n\nkept in ${keep()}`)
process.exit(failures === 0 ? 0 : 1)

async function native (name) {
  console.log(`--- ${name}`)
  const { code, late, text, out } = await runLimited([join(PROGRAMS, name), ...nativeArguments(name)], {
    seconds: NATIVE_LIMIT_S
  })
  console.log(text)
  if (code !== 0) failures++
  const isTable = out.split('\n').some(line => line.startsWith('| '))
  sections.push(
    `## ${name}\n\n${isTable ? out : `\`\`\`\n${out}\n\`\`\``}${
      code === 0
        ? ''
        : `\n\nFAILED (${late ? `still running after ${NATIVE_LIMIT_S} s` : code}): ${
          text
            .split('\n')
            .at(-1)
        }`
    }`
  )
  keep()
}

function nativeArguments (name) {
  // Its file is in the folder of the servers' checkpoints.
  if (name === 'disk_bench') return [options.folder ?? (existsSync('/dev/shm') ? '/dev/shm' : tmpdir())]
  if (name !== 'profile_bench') return []
  // The names of the Python programs' models are longer; with one of them it runs all of its own.
  return [
    ...options.layers === undefined ? [] : ['--layers', options.layers],
    ...PROFILE_MODELS.includes(options.model) ? ['--model', options.model] : []
  ]
}

async function pythonParts (parts, program, title, flags) {
  if (parts.length === 0) return
  const folder = mkdtempSync(join(tmpdir(), 'refit-bench-gpu-'))
  const rows = join(folder, 'rows.md')
  underWay = { title, rows }
  const given = flags.flatMap(name => options[name] === undefined ? [] : [`--${name}`, options[name]])
  const { code, late } = await runLimited([
    python,
    '-u',
    join('bench', 'gpu', program),
    '--out',
    rows,
    ...given,
    ...parts.flatMap(part => ['--only', part])
  ], { seconds: SERVER_LIMIT_S, show: true })
  if (code !== 0) failures++
  underWay = undefined
  const why = code === 0
    ? undefined
    : `| ${program} | FAILED (${late ? `still running after ${SERVER_LIMIT_S} s` : code}) | | | | NO |`
  sections.push(tableOf({ title, rows, why }))
  rmSync(folder, { recursive: true })
  keep()
}

/** The rows that a program has written so far; `why`: the error, if its rows do not report it. */
function tableOf ({ title, rows, why }) {
  const told = existsSync(rows) ? readFileSync(rows, 'utf8').trimEnd() : ''
  const lines = [...told === '' ? [] : [told], ...why === undefined || told.includes('FAILED') ? [] : [why]]
  const head = '| figure | refit | compared with | ratio | goal | reached |\n| --- | --- | --- | --- | --- | --- |'
  return `## ${title}\n\n${head}\n${lines.join('\n')}`
}

function head () {
  const command = ['npm run bench:gpu', ...process.argv.length > 2 ? ['--', ...process.argv.slice(2)] : []].join(' ')
  const { version } = JSON.parse(readFileSync('package.json', 'utf8'))
  const programs = `refit ${version}, Node ${process.versions.node}`
  return `${date} · ${card.length} x ${cardName} · driver ${driver} · ${libraries} · ${programs} · \`${command}\``
}

/** Writes all results so far, so a program that hangs loses none. Returns the path. */
function keep () {
  const slug = `${card.length > 1 ? `${card.length}x-` : ''}${cardName.toLowerCase().replace(/[^a-z0-9]+/g, '-')}`
  const file = join(options.results, `${date}-${slug}-${options.name}.md`)
  mkdirSync(options.results, { recursive: true })
  writeFileSync(file, `# ${options.name}\n\n${head()}\n\n${sections.join('\n\n')}\n`)
  return file
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
      options: {
        only: { type: 'string', multiple: true, default: [] },
        tp: text,
        model: text,
        layers: text,
        folder: text,
        results: { type: 'string', default: join('bench', 'results') },
        name: { type: 'string', default: 'gpu' },
        'no-build': { type: 'boolean', default: false }
      }
    })
      .values
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
