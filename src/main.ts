import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { gatewayHelp, serveHelp } from './config/help.ts'
import { suggest } from './config/suggest.ts'
import { RefitError } from './errors.ts'
import { packageRoot } from './root.ts'

// The command line. Exit codes: 0 done, 1 failed, 2 wrong arguments, 70 a device was lost (src/cli/end-on-failure.ts).

interface Command {
  summary: string
  help: () => string | Promise<string>
  run: (args: string[]) => Promise<void>
}

const COMMANDS: Record<string, Command> = {
  serve: {
    summary: 'serve MODEL       Load a model and serve it over HTTP.',
    help: () => serveHelp(Math.min(process.stdout.columns ?? 100, 120)),
    // Each command loads its own modules, so that `--help` answers at once.
    run: async args => await (await import('./cli/serve.ts')).serve(args)
  },
  demo: {
    summary: 'demo              Serve the bundled model and train it: watch it learn.',
    help: async () => (await import('./cli/demo.ts')).DEMO_HELP,
    run: async args => await (await import('./cli/demo.ts')).demo(args)
  },
  gateway: {
    summary: 'gateway           Serve many engines at one address: --engine URL --engine URL ...',
    help: () => gatewayHelp(Math.min(process.stdout.columns ?? 100, 120)),
    run: async args => await (await import('./cli/gateway.ts')).gateway(args)
  },
  devices: {
    summary: 'devices           Show the CUDA cards and libraries that can be used.',
    help: async () => (await import('./cli/devices.ts')).DEVICES_HELP,
    run: async args => await (await import('./cli/devices.ts')).devices(args)
  },
  replay: {
    summary: 'replay RECEIPT    Generate a sample again from its receipt, and compare.',
    help: async () => (await import('./cli/replay.ts')).REPLAY_HELP,
    run: async args => await (await import('./cli/replay.ts')).replay(args)
  },
  conformance: {
    summary: 'conformance URL   Check what a server promises about weight updates.',
    help: async () => (await import('./cli/conformance.ts')).CONFORMANCE_HELP,
    run: async args => await (await import('./cli/conformance.ts')).conformance(args)
  },
  bench: {
    summary: 'bench URL         Measure throughput and latency of a server.',
    help: async () => (await import('./cli/bench.ts')).BENCH_HELP,
    run: async args => await (await import('./cli/bench.ts')).bench(args)
  },
  chat: {
    summary: 'chat URL          Chat with a model in this terminal.',
    help: async () => (await import('./cli/chat.ts')).CHAT_HELP,
    run: async args => await (await import('./cli/chat.ts')).chat(args)
  },
  report: {
    summary: 'report [URL]      Write one file that describes a server, for a bug report.',
    help: async () => (await import('./cli/report.ts')).REPORT_HELP,
    run: async args => await (await import('./cli/report.ts')).report(args)
  }
}

const HELP = `refit: a rollout server whose weights can be replaced while it runs.

Usage: refit COMMAND [options]

Commands:
${Object.values(COMMANDS).map(({ summary }) => '  ' + summary).join('\n')}

refit COMMAND --help lists the options of a command; refit --version prints the version.
`

async function run (args: string[]): Promise<void> {
  const [name, ...rest] = args
  if (name === undefined) {
    process.stderr.write(HELP)
    process.exitCode = 2
    return
  }
  if (['--version', '-v', '-V', 'version'].includes(name)) return print(version() + '\n')
  if (['--help', '-h', 'help'].includes(name)) return print(rest[0] === undefined ? HELP : await find(rest[0]).help())
  const command = find(name)
  const options = rest.includes('--') ? rest.slice(0, rest.indexOf('--')) : rest
  if (options.includes('--help') || options.includes('-h')) return print(await command.help())
  await command.run(rest)
}

function find (name: string): Command {
  const command = Object.hasOwn(COMMANDS, name) ? COMMANDS[name] : undefined
  if (command !== undefined) return command
  const near = suggest(name, Object.keys(COMMANDS))
  const hint = name.startsWith('-')
    ? `options come after a command: "refit serve MODEL ${name}"`
    : near !== undefined
    ? `did you mean "refit ${near}"?`
    : `to serve a model: "refit serve ${name}"`
  throw new RefitError('CONFIG', `unknown command ${JSON.stringify(name)}; ${hint}`, { param: name })
}

function version (): string {
  return (JSON.parse(readFileSync(join(packageRoot, 'package.json'), 'utf8')) as { version: string }).version
}

function print (text: string): void {
  process.stdout.write(text)
}

async function main (args: string[]): Promise<void> {
  try {
    await run(args)
  } catch (error) {
    // An error that the user can fix prints its message; the stack is printed for defects only.
    const isKnown = error instanceof RefitError && error.code !== 'INTERNAL'
    process.stderr.write(`refit: ${isKnown ? error.message : error instanceof Error ? error.stack : String(error)}\n`)
    // Any other way to end would wait for threads that are stuck in the device.
    if (error instanceof RefitError && error.code === 'DEVICE_LOST') {
      ;(await import('./engine/end-process.ts')).endProcess((await import('./cli/end-on-failure.ts')).LOST_DEVICE_EXIT)
    }
    process.exit(error instanceof RefitError && error.code === 'CONFIG' ? 2 : 1)
  }
}

/**
 * Importers await it, so that Node.js reports a command that never settles. CommonJS, into which scripts/code-cache.js
 * joins this file, has no await here.
 */
export const ended = main(process.argv.slice(2))
