import t from 'tap'
import type { Test } from 'tap'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import { packageRoot } from '../../src/root.ts'
import { GroupTrainer } from '../helpers/group-trainer.ts'
import { tensorsOf } from '../helpers/transaction-server.ts'

// Signals reach a server in the middle of a receive. After the second one nothing runs but the end of the process:
// exit handlers and destructors of libraries would run beside threads that still use them.

const MAIN = fileURLToPath(new URL('../../src/main.js', import.meta.url))
const MODEL = join(packageRoot, 'models/adder-base')
const WITNESS = 'data:text/javascript,process.on("exit",()=>console.error("exit handlers"))'

interface Served {
  url: string
  post: (path: string, body: object) => Promise<number>
  /** Number of requests that wait. */
  waiting: () => Promise<number>
  kill: () => boolean
  /** Resolves when the server has logged the text. */
  logged: (text: string) => Promise<void>
  exit: Promise<unknown[]>
  stderr: () => string
}

async function serve (t: Test, args: string[]): Promise<Served> {
  const child = spawn(
    process.execPath,
    ['--import', WITNESS, MAIN, 'serve', MODEL, '--port', '0', '--threads', '1', '--max-total-tokens', '4096', ...args],
    { env: { PATH: process.env.PATH, HOME: '/nonexistent' }, stdio: ['ignore', 'pipe', 'pipe'] }
  )
  t.teardown(() => child.kill('SIGKILL'))
  const exit = once(child, 'close')
  let stderr = ''
  child.stderr.on('data', chunk => {
    stderr += String(chunk)
  })
  const lines: string[] = []
  const reader = createInterface({ input: child.stdout }).on('line', line => {
    lines.push(line)
  })
  const logged = async (text: string): Promise<void> => {
    while (!lines.some(line => line.includes(text))) await once(reader, 'line')
  }
  await Promise.race([logged('is ready on'), exit.then(() => Promise.reject(new Error(stderr)))])
  const url = /is ready on (http:[^\s"]+)/.exec(lines.find(line => line.includes('is ready on'))!)![1]!
  const post = async (path: string, body: object): Promise<number> => {
    const reply = await fetch(url + path, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(body)
    })
    if (!reply.ok) t.comment(await reply.text())
    return reply.status
  }
  const waiting = async (): Promise<number> => {
    const { loads } = await (await fetch(`${url}/v1/loads`)).json() as { loads: { num_waiting_reqs: number }[] }
    return loads[0]!.num_waiting_reqs
  }
  return { url, post, waiting, kill: () => child.kill('SIGTERM'), logged, exit, stderr: () => stderr }
}

/** A server that has received the first of all tensors over gloo, and waits for the next. */
async function receiving (t: Test, args: string[]) {
  const server = await serve(t, args)
  const trainer = await GroupTrainer.start({ size: 2 })
  t.teardown(async () => {
    await trainer.end().catch(() => {})
  })
  const [init] = await Promise.all([server.post('/init_weights_update_group', trainer.init()), trainer.join()])
  t.equal(init, 200)
  t.equal(await server.post('/pause_generation', { mode: 'in_place' }), 200)
  const tensors = tensorsOf(MODEL).map(tensor => ({ ...tensor, dtype: 'bfloat16' }))
  const update = server.post('/update_weights_from_distributed', trainer.update(tensors)).catch(() => 'cut')
  await trainer.send(tensors.slice(0, 1))
  return { server, update }
}

for (const more of [[], ['--shadow-weights']]) {
  t.test(`a signal in the middle of a receive ends it and the server ${more.join(' ')}`, async t => {
    const { server, update } = await receiving(t, ['--shutdown-timeout', '0.2', ...more])
    server.kill()
    t.not(await update, 200)
    t.same(await server.exit, [0, null], server.stderr())
  })

  t.test(`a second signal in the middle of a receive ends the process with 1 ${more.join(' ')}`, async t => {
    for (let round = 0; round < 3; round++) {
      const { server, update } = await receiving(t, ['--shutdown-timeout', '600', ...more])
      // The shutdown waits for this request.
      const held = server.post('/generate', { text: '1+1=' }).catch(() => 'cut')
      while (await server.waiting() === 0) await new Promise(resolve => setTimeout(resolve, 5))
      server.kill()
      await server.logged('SIGTERM: shutting down')
      server.kill()
      t.same(await server.exit, [1, null], server.stderr())
      await server.logged('second SIGTERM: ending at once')
      t.notMatch(server.stderr(), /exit handlers/)
      await Promise.all([update, held])
    }
  })
}
