import { spawn, spawnSync } from 'node:child_process'
import type { ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import { chmodSync, readdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import t from 'tap'
import type { Test } from 'tap'
import { eventually } from '../helpers/eventually.js'

const isSource = import.meta.url.endsWith('.ts')
const MAIN = [
  ...isSource ? process.execArgv : [],
  fileURLToPath(new URL(`../../src/main${isSource ? '.ts' : '.js'}`, import.meta.url))
]

interface Demo {
  child: ChildProcess
  /** Resolves to the match once the output has it. */
  printed: (pattern: RegExp) => Promise<RegExpExecArray>
  /** Ids of the processes that this demo has started and that live. */
  alive: () => number[]
}

let marks = 0

/** Runs `refit demo`; its processes are found by a variable that they inherit. */
function demo (t: Test, args: string[], env: Record<string, string>): Demo {
  const mark = `refit-demo-${process.pid}-${marks++}`
  const child = spawn(process.execPath, [...MAIN, 'demo', '--port', '0', '--threads', '1', ...args], {
    env: { HOME: '/nonexistent', REFIT_DEMO_MARK: mark, ...env },
    stdio: ['ignore', 'pipe', 'pipe']
  })
  const alive = (): number[] =>
    readdirSync('/proc').filter(name => /^\d+$/.test(name)).map(Number).filter(pid => {
      try {
        return readFileSync(`/proc/${pid}/environ`, 'latin1').includes(mark)
      } catch {
        return false
      }
    })
  t.teardown(() => {
    for (const pid of alive()) process.kill(pid, 'SIGKILL')
  })
  let text = ''
  const waiting: (() => void)[] = []
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', chunk => {
      text += chunk
      for (const wake of waiting.splice(0)) wake()
    })
  }
  child.once('exit', () => {
    for (const wake of waiting.splice(0)) wake()
  })
  const printed = async (pattern: RegExp): Promise<RegExpExecArray> => {
    for (;;) {
      const match = pattern.exec(text)
      if (match !== null) return match
      if (child.exitCode !== null) throw new Error(`ended with ${child.exitCode} without ${pattern}: ${text}`)
      await new Promise<void>(resolve => waiting.push(resolve))
    }
  }
  return { child, printed, alive }
}

t.test('wrong options are refused before anything starts', async t => {
  for (
    const [args, message] of [
      [['--steps', 'many'], /^refit: demo: --steps: expected a whole number from 1, got "many"\n$/],
      [['--python'], /^refit: demo: --python needs a value\n$/],
      [['--python', '/nonexistent/python'], /^refit: demo: --python \/nonexistent\/python: .*ENOENT/],
      [['--python', 'true', '--dp', '2'], /^refit: demo: --dp/],
      [['--prot', '1'], /^refit: --prot: unknown option; did you mean --port\?\n$/]
    ] as const
  ) {
    const { status, stderr } = spawnSync(process.execPath, [...MAIN, 'demo', ...args], { encoding: 'utf8' })
    t.equal(status, 2, args.join(' '))
    t.match(stderr, message)
  }
})

t.test('without a Python that has torch, the demo serves, and says what to install', async t => {
  // A Python that has no library.
  const folder = t.testdir({ python3: '#!/bin/sh\necho torch, transformers >&2\nexit 1\n' })
  chmodSync(join(folder, 'python3'), 0o755)
  const { child, printed, alive } = demo(t, [], { PATH: '/usr/bin:/bin', REFIT_PYTHON: join(folder, 'python3') })
  const [, url] = await printed(/refit demo: open (http:\/\/127\.0\.0\.1:\d+)\/ui /)
  await printed(/pip install torch transformers\n {2}refit demo --python refit-venv\/bin\/python\n/)
  t.equal((await fetch(`${url}/health`)).status, 200)
  const ended = once(child, 'exit')
  child.kill('SIGINT')
  t.same(await ended, [0, null])
  t.same(alive(), [])
})

// A program in the place of Python, so that the lives of processes are tested where torch is missing; test/interop runs
// the real trainer.
const STAND_IN = `#!/bin/sh
[ "$1" = -c ] && exit 0
echo "trainer: $*"
sleep 1000 &
echo "helper: $!"
`

for (
  const [how, ending] of [['waits', 'wait\n'], ['ignores SIGTERM', "trap '' TERM\nwhile :; do wait; done\n"]] as const
) {
  t.test(`Ctrl-C ends the server, a trainer that ${how}, and what the trainer has started`, async t => {
    const folder = t.testdir()
    writeFileSync(join(folder, 'python'), STAND_IN + ending, { mode: 0o755 })
    const { child, printed, alive } = demo(t, ['--python', join(folder, 'python'), '--steps', '7'], {
      PATH: '/usr/bin:/bin'
    })
    const [, url] = await printed(/open (http:\S+)\/ui /)
    const [, line] = await printed(/trainer: (.*)\n/)
    t.match(line, new RegExp(`examples/grpo/grpo\\.py --url ${url} --steps 7 --patience 20$`))
    await printed(/helper: \d+\n/)
    // A process has no environment while exec replaces its memory.
    await eventually(() => alive().length, count => count >= 3)
    const ended = once(child, 'exit')
    child.kill('SIGINT')
    t.same(await ended, [0, null])
    t.same(alive(), [])
  })
}

t.test('the server goes on when the trainer has ended', async t => {
  const folder = t.testdir()
  writeFileSync(join(folder, 'python'), '#!/bin/sh\n[ "$1" = -c ] && exit 0\nexit 3\n', { mode: 0o755 })
  const { child, printed } = demo(t, [`--python=${join(folder, 'python')}`], { PATH: '/usr/bin:/bin' })
  const [, url] = await printed(/open (http:\S+)\/ui /)
  await printed(/the trainer ended \(3\); the server goes on/)
  t.equal((await fetch(`${url}/health`)).status, 200)
  const ended = once(child, 'exit')
  child.kill('SIGTERM')
  t.same(await ended, [0, null])
})
