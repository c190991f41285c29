import { spawn, spawnSync } from 'node:child_process'
import type { ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import { existsSync } from 'node:fs'
import { join } from 'node:path'
import closeWithGrace from 'close-with-grace'
import { loadConfig } from '../config/load-config.ts'
import { resolveModel } from '../config/resolve-model.ts'
import { RefitError } from '../errors.ts'
import { packageRoot } from '../root.ts'
import { checkPort } from './check-port.ts'
import { createLog } from './log.ts'
import { CLOSE_MS, openServer } from './open-server.ts'

export const DEMO_HELP = `Usage: refit demo [--python PATH] [options of refit serve]

Serves the bundled model, which adds badly, and trains it with GRPO (examples/grpo) through this server. Open the
address that it prints. Ctrl-C ends both.

  --python PATH        a Python with torch and transformers (default: the variable REFIT_PYTHON, else the first of
                       build/venv/bin/python, python3 and python that has both; without one, the server runs alone)
  --steps N            most steps of the trainer (default 320; it ends at 99 % of unseen sums)
`

const LIBRARIES = ['torch', 'transformers']
// sys.exit(0) succeeds, and sys.exit('') would not.
const PROBE = 'import importlib.util as u, sys; ' +
  "sys.exit(', '.join(name for name in sys.argv[1:] if u.find_spec(name) is None) or 0)"
/** Seconds that the trainer waits for a server that is gone. */
const PATIENCE_S = 20
const STOP_MS = 3000

/** `refit demo`: resolves once the server listens and the trainer has started. */
export async function demo (args: readonly string[]): Promise<void> {
  const { python, steps, rest } = readArguments(args)
  const models = join(packageRoot, 'models')
  const quiet = rest.some(arg => arg.startsWith('--log-level')) ? [] : ['--log-level', 'warn']
  const { config, warnings } = loadConfig(
    [join(models, 'adder-base'), '--served-model-name', 'adder', '--model-root', models, ...quiet, ...rest],
    process.env
  )
  if (config.dp > 1) throw bad('--dp: the demo has one engine; see examples/grpo for a gateway')
  const log = createLog(config.logLevel)
  for (const warning of warnings) log.warn(warning)
  const found = findPython(python)
  await checkPort(config.host, config.port)
  const server = await openServer({ config, model: resolveModel(config.model!, config.revision, process.env), log })
  const trainer = found === null ? null : startTrainer(found, server.url, steps, config.apiKey)
  closeWithGrace(
    { delay: config.shutdownTimeout * 1000 + CLOSE_MS + STOP_MS, logger: log },
    async ({ err }) => {
      if (err !== undefined) log.fatal({ err }, 'failed; shutting down')
      await stop(trainer)
      await server.close(0)
    }
  )
  print(`refit demo: open ${server.url}/ui (Ctrl-C ends it)`)
  if (trainer === null) return print(howToInstall())
  trainer.once('exit', (code, signal) => {
    print(`refit demo: the trainer ended (${signal ?? code}); the server goes on until Ctrl-C`)
  })
}

function readArguments (args: readonly string[]): { python: string | undefined, steps: string, rest: string[] } {
  const own: Record<string, string> = {}
  const rest: string[] = []
  for (let i = 0; i < args.length; i++) {
    const [, name, value] = /^--(python|steps)(?:=(.*))?$/.exec(args[i]!) ?? []
    if (name === undefined) rest.push(args[i]!)
    else {
      own[name] = value ?? args[++i] ?? ''
      if (own[name] === '') throw bad(`--${name} needs a value`)
    }
  }
  const steps = own.steps ?? '320'
  if (!/^[1-9]\d{0,6}$/.test(steps)) throw bad(`--steps: expected a whole number from 1, got ${JSON.stringify(steps)}`)
  return { python: own.python, steps, rest }
}

/** Null if none has the libraries. Throws for a chosen one that lacks them. */
function findPython (chosen: string | undefined): string | null {
  if (chosen !== undefined) {
    const missing = lacks(chosen)
    if (missing === null) return chosen
    throw bad(`--python ${chosen}: ${missing}`)
  }
  const own = join(packageRoot, 'build', 'venv', 'bin', 'python')
  const named = process.env.REFIT_PYTHON
  const candidates = named !== undefined ? [named] : [...existsSync(own) ? [own] : [], 'python3', 'python']
  return candidates.find(python => lacks(python) === null) ?? null
}

/** Null if it has all libraries, else what is missing. */
function lacks (python: string): string | null {
  const { status, stderr, error } = spawnSync(python, ['-c', PROBE, ...LIBRARIES], { encoding: 'utf8' })
  if (status === 0) return null
  return error === undefined ? `it lacks ${stderr.trim().split('\n').at(-1) ?? 'something'}` : error.message
}

function howToInstall (): string {
  return `refit demo: no Python with ${LIBRARIES.join(' and ')} was found, so nothing trains. To see it learn:
  python3 -m venv refit-venv
  refit-venv/bin/pip install ${LIBRARIES.join(' ')}
  refit demo --python refit-venv/bin/python`
}

function startTrainer (python: string, url: string, steps: string, apiKey: string | null): ChildProcess {
  const program = join(packageRoot, 'examples', 'grpo', 'grpo.py')
  const child = spawn(python, [program, '--url', url, '--steps', steps, '--patience', String(PATIENCE_S)], {
    stdio: ['ignore', 'inherit', 'inherit'],
    env: { ...process.env, PYTHONUNBUFFERED: '1', ...apiKey === null ? {} : { REFIT_API_KEY: apiKey } },
    // A process group of its own: Ctrl-C reaches this process alone, which then ends all processes of the group.
    detached: true
  })
  child.on('error', error => print(`refit demo: the trainer cannot start: ${error.message}`))
  return child
}

/** Ends the trainer and the processes that it has started. */
async function stop (trainer: ChildProcess | null): Promise<void> {
  if (trainer?.pid === undefined) return
  const hasEnded = trainer.exitCode !== null || trainer.signalCode !== null
  trainer.removeAllListeners('exit')
  const kill = (signal: NodeJS.Signals): void => {
    try {
      process.kill(-trainer.pid!, signal)
    } catch { /* The group has ended. */ }
  }
  const ended = hasEnded ? Promise.resolve() : once(trainer, 'exit')
  kill('SIGTERM')
  const timer = setTimeout(() => kill('SIGKILL'), STOP_MS)
  await ended
  clearTimeout(timer)
  // A process of the group may have ignored the first signal.
  kill('SIGKILL')
}

function print (text: string): void {
  process.stdout.write(text + '\n')
}

function bad (message: string): RefitError {
  return new RefitError('CONFIG', `demo: ${message}`)
}
