import { spawnSync } from 'node:child_process'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { joinProgram, SHORT_LIVED } from './join-modules.js'
import { pythonWith } from './python.js'

// npm run test:trainers [-- --newest -k trl]: the released packages of trainers and servers drive refit with their own
// client code (test/trainers/wheels.json; with --newest their newest releases). Other options go to pytest. The Python
// needs the libraries in test/interop/requirements.txt.

process.chdir(join(dirname(fileURLToPath(import.meta.url)), '..'))
const newest = process.argv.includes('--newest')
const options = process.argv.slice(2).filter(option => option !== '--newest')
const python = pythonWith(['torch', 'transformers', 'openai', 'zmq', 'pytest', 'xdist'], 'test:trainers')
const wheels = join('build', newest ? 'wheels-newest' : 'wheels')
const program = await joinProgram()
run([join('scripts', 'wheels.py'), ...newest ? ['--newest'] : []])
run(['-m', 'pytest', '-q', '-n', '2', '--dist', 'loadfile', join('test', 'trainers'), ...options])

function run (args) {
  const env = {
    ...process.env,
    REFIT_NODE_FLAGS: SHORT_LIVED.join(' '),
    REFIT_PROGRAM: program,
    REFIT_SKIP_SERVER_WARMUP: 'true',
    REFIT_TEST_PORTS: '14000 20000',
    REFIT_WHEELS: wheels
  }
  const { status, error } = spawnSync(python, args, { stdio: 'inherit', env })
  if (error !== undefined) console.error(`npm run test:trainers: ${error.message}`)
  if (status !== 0) process.exit(status ?? 1)
}
