import { spawn, spawnSync } from 'node:child_process'
import { existsSync, readdirSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { joinProgram, SHORT_LIVED } from './join-modules.js'
import { pythonWith } from './python.js'

// npm run test:interop [-- --rounds 100]: refit against the real Python libraries. test/interop has *.test.ts (which
// read the interpreter from $REFIT_PYTHON) and test_*.py (pytest, which gets the arguments). test/contract has the
// requests of each trainer (npm run matrix makes their table). The Python needs the libraries in
// test/interop/requirements.txt; the wheel of Megatron-core is fetched here.

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
const FOLDERS = [join('test', 'interop'), join('test', 'contract')]
const LIBRARIES = [
  'torch',
  'transformers',
  'peft',
  'safetensors',
  'openai',
  'ray',
  'zmq',
  'zstandard',
  'xxhash',
  'pytest',
  'xdist'
]
const python = pythonWith(LIBRARIES, 'test:interop')
for (const [folder, pattern] of [[FOLDERS[0], /\.test\.ts$/], ...FOLDERS.map(folder => [folder, /^test_.*\.py$/])]) {
  const names = existsSync(folder) ? readdirSync(folder) : []
  if (!names.some(name => pattern.test(name))) fail(`there are no tests in ${folder}`)
}

const { status } = spawnSync(python, [join('scripts', 'wheels.py'), 'megatron-core', 'einops'], { stdio: 'inherit' })
if (status !== 0) fail('the wheels of Megatron-core cannot be had')
const program = await joinProgram()

// All run at the same time, because each often waits for processes, connections and deadlines. Each folder has its own
// conftest.py and so needs its own pytest, and each pytest needs its own ports.
const pytest = ['-m', 'pytest', '-q', '--dist', 'loadfile', '--durations=15']
const runs = [
  run(process.execPath, [join('scripts', 'test.js'), FOLDERS[0], '--jobs=1'], {}),
  run(python, [...pytest, '-n', '2', FOLDERS[0], ...process.argv.slice(2)], { REFIT_TEST_PORTS: '20000 26000' }),
  // One worker less: torch fails when its shared memory manager takes a second to answer, on a machine too busy.
  run(python, [...pytest, '-n', '1', FOLDERS[1]], { REFIT_TEST_PORTS: '26000 32000' })
]
// One after another, so that their outputs do not mix.
for (const ended of runs) {
  const { title, code, text } = await ended
  console.log(`\n--- ${title}\n${text}`)
  if (code !== 0) process.exitCode = 1
}

/** Runs a program to its end, and resolves to its exit code and what it wrote. */
async function run (command, args, env) {
  const child = spawn(command, args, {
    stdio: ['ignore', 'pipe', 'pipe'],
    // The models are small: torch's threads would wait for each other longer than they compute.
    env: {
      ...process.env,
      OMP_NUM_THREADS: '1',
      REFIT_NODE_FLAGS: SHORT_LIVED.join(' '),
      REFIT_PROGRAM: program,
      REFIT_PYTHON: python,
      REFIT_REQUIRE_INTEROP: '1',
      // It takes as much CPU time as the start of a server, and most of these servers live for seconds.
      REFIT_SKIP_SERVER_WARMUP: 'true',
      ...env
    }
  })
  const chunks = []
  for (const stream of [child.stdout, child.stderr]) stream.on('data', chunk => chunks.push(chunk))
  const code = await new Promise((resolve, reject) => child.on('error', reject).on('close', resolve))
  return { title: args.join(' '), code, text: Buffer.concat(chunks).toString() }
}

function fail (message) {
  console.error(`npm run test:interop: ${message}`)
  process.exit(1)
}
