import t from 'tap'
import type { Test } from 'tap'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import { createEngine } from '../../src/app/create-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { bareFolder, modelFolder, SMALL } from '../helpers/load-from.ts'

// Servers in processes of their own: processes that end in the middle of a transfer, and exit codes.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

const isSource = import.meta.url.endsWith('.ts')
const MAIN = [
  ...isSource ? process.execArgv : [],
  fileURLToPath(new URL(`../../src/main${isSource ? '.ts' : '.js'}`, import.meta.url))
]

interface Started {
  kill: (signal: NodeJS.Signals) => void
  ready: Promise<string>
  /** Resolves once the server has logged from where it loads its weights. */
  coming: Promise<void>
  ended: Promise<{ code: number | null, stderr: string, log: string }>
}

function start (t: Test, model: string, args: string[], env: Record<string, string> = {}): Started {
  const child = spawn(process.execPath, [
    ...MAIN,
    'serve',
    model,
    '--port',
    '0',
    '--threads',
    '1',
    '--max-total-tokens',
    '4096',
    ...args
  ], {
    env: { PATH: process.env.PATH, HOME: '/nonexistent', REFIT_NATIVE: process.env.REFIT_NATIVE, ...env },
    stdio: ['ignore', 'pipe', 'pipe']
  })
  t.teardown(() => child.kill('SIGKILL'))
  let stderr = ''
  let log = ''
  child.stderr.on('data', chunk => {
    stderr += chunk
  })
  let came = (): void => {}
  const coming = new Promise<void>(resolve => {
    came = resolve
  })
  const ready = new Promise<string>((resolve, reject) => {
    createInterface({ input: child.stdout }).on('line', line => {
      log += line + '\n'
      if (line.includes('weights come from')) came()
      const url = /is ready on (http:[^\s"]+)/.exec(line)?.[1]
      if (url !== undefined) resolve(url)
    })
    child.once('exit', code => {
      reject(new Error(`ended with ${code}: ${stderr}`))
    })
  })
  ready.catch(() => {})
  return {
    kill: signal => {
      child.kill(signal)
    },
    ready,
    coming,
    ended: once(child, 'close').then(([code]) => ({ code: code as number | null, stderr, log }))
  }
}

const generate = async (url: string): Promise<any> =>
  await (await fetch(`${url}/generate`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ text: '12+30=', sampling_params: { temperature: 0, max_new_tokens: 8 } })
  }))
    .json()

t.test('a second server starts from a first one, with a key from the environment, and generates the same', async t => {
  const first = start(t, modelFolder('adder'), ['--weight-version', 'step-3'], { REFIT_ADMIN_API_KEY: 'secret' })
  const url = await first.ready
  const folder = bareFolder(t, 'adder')
  const second = start(t, folder, ['--load-from', url, '--tp', '2'], { REFIT_LOAD_FROM_KEY: 'secret' })
  const wrong = start(t, folder, ['--load-from', url], { REFIT_LOAD_FROM_KEY: 'guess' })
  const other = await second.ready
  const [one, two] = [await generate(url), await generate(other)]
  t.equal(two.text, one.text)
  t.equal(two.meta_info.weight_version, 'step-3')
  t.match(await (await fetch(`${other}/model_info`)).json(), { weight_version: 'step-3' })
  const ended = await wrong.ended
  t.equal(ended.code, 2)
  t.match(ended.stderr, /^refit: http:.* refuses: Unauthorized; --load-from-key \(REFIT_LOAD_FROM_KEY\).*\n$/)
  second.kill('SIGTERM')
  const { log } = await second.ended
  t.match(log, /weights come from .* over gloo/)
  t.notMatch(log, /secret/)
})

t.test('a missing peer, or another kind of server, ends the start with a message and exit code 1', async t => {
  const folder = bareFolder(t, 'adder')
  const none = await start(t, folder, ['--load-from', 'http://127.0.0.1:1']).ended
  t.equal(none.code, 1)
  t.match(none.stderr, /^refit: no refit server answers at http:\/\/127.0.0.1:1 \(.*ECONNREFUSED.*\)\n$/)
  const noUrl = await start(t, folder, ['--load-from', '127.0.0.1:1']).ended
  t.equal(noUrl.code, 2)
  t.match(noUrl.stderr, /^refit: --load-from: expected the URL of a refit server, such as/)
})

t.test('if the peer is killed during a load, the engine does not start and reports it', async t => {
  const first = start(t, modelFolder('adder'), [])
  const url = await first.ready
  let killed = false
  const loading = createEngine(bareFolder(t, 'adder'), {
    ...SMALL,
    tp: 2,
    loadFrom: { url, pieceBytes: 2048, timeoutMs: 60_000 },
    onProgress: (done, total) => {
      if (killed || done < total / 2) return
      killed = true
      first.kill('SIGKILL')
    }
  })
  await t.rejects(loading, { message: /the connection to http:.* broke|gloo group/ })
  t.ok(killed)
})

t.test('killing a server while it loads from a peer does not harm the peer', async t => {
  const first = start(t, modelFolder('adder'), [])
  const url = await first.ready
  const before = await generate(url)
  const folder = bareFolder(t, 'adder')
  for (const after of [0, 5, 15]) {
    const second = start(t, folder, ['--load-from', url])
    await second.coming
    await new Promise(resolve => setTimeout(resolve, after))
    second.kill('SIGKILL')
    await second.ended
    t.equal((await generate(url)).text, before.text)
  }
  const last = start(t, folder, ['--load-from', url])
  t.equal((await generate(await last.ready)).text, before.text)
})
