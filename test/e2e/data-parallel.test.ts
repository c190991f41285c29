import { spawn, spawnSync } from 'node:child_process'
import type { ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import t from 'tap'
import type { Test } from 'tap'
import { ask, modelFolder } from '../helpers/gateway.ts'

const isSource = import.meta.url.endsWith('.ts')
const MAIN = [
  ...isSource ? process.execArgv : [],
  fileURLToPath(new URL(`../../src/main${isSource ? '.ts' : '.js'}`, import.meta.url))
]
const FLAGS = ['--dp', '2', '--port', '0', '--threads', '1', '--max-total-tokens', '4096']
const KEY = 'hunter2'

interface Replicas {
  child: ChildProcess
  url: string
  lines: Record<string, any>[]
  exit: Promise<unknown[]>
  call: (method: string, path: string, body?: object) => Promise<{ status: number, body: any }>
  pids: () => number[]
}

/** `refit serve --dp 2` as a user starts it. */
async function replicasOf (t: Test, folder: string, ...flags: string[]): Promise<Replicas> {
  const env = { PATH: process.env.PATH, HOME: '/nonexistent', REFIT_API_KEY: KEY }
  const child = spawn(process.execPath, [...MAIN, 'serve', join(folder, 'adder-base'), ...FLAGS, ...flags], {
    env,
    stdio: ['ignore', 'pipe', 'inherit']
  })
  t.teardown(() => child.kill('SIGKILL'))
  // After the last line of its output.
  const exit = once(child, 'close')
  const lines: Record<string, any>[] = []
  const url = await new Promise<string>((resolve, reject) => {
    createInterface({ input: child.stdout }).on('line', line => {
      lines.push(JSON.parse(line) as Record<string, any>)
      const ready = /^\S+ is ready on (http:\S+)/.exec(lines.at(-1)!['msg'])
      if (ready !== null) resolve(ready[1]!)
    })
    child.once('exit', code => reject(new Error(`ended with ${code}`)))
  })
  const call = async (method: string, path: string, body?: object): Promise<{ status: number, body: any }> => {
    const reply = await fetch(url + path, {
      method,
      headers: { authorization: `Bearer ${KEY}`, 'content-type': 'application/json' },
      ...body === undefined ? {} : { body: JSON.stringify(body) }
    })
    const text = await reply.text()
    return {
      status: reply.status,
      body: /json/.test(reply.headers.get('content-type') ?? '') ? JSON.parse(text) : text
    }
  }
  // The log has the process of each engine.
  const pids = (): number[] => {
    const last = new Map(lines.filter(({ dp_rank: rank }) => rank !== undefined).map(line => [line['dp_rank'], line]))
    return [0, 1].map(rank => last.get(rank)!['pid'])
  }
  return { child, url, lines, exit, call, pids }
}

async function until (done: () => Promise<boolean> | boolean): Promise<void> {
  while (!await done()) await new Promise(resolve => setTimeout(resolve, 20))
}

function isAlive (pid: number): boolean {
  try {
    process.kill(pid, 0)
    return true
  } catch {
    return false
  }
}

t.test('two engines behind one port generate by rank and take one update', async t => {
  const folder = modelFolder(t)
  const { child, call, lines, exit, pids } = await replicasOf(t, folder)
  const sizes = (await call('GET', '/server_info?config_format=json')).body
  t.match(sizes, { tp_size: 2, dp_size: 2, vllm_config: { parallel_config: { data_parallel_size: 2, world_size: 1 } } })
  t.same((await call('GET', '/get_world_size')).body, { world_size: 2 })
  t.same((await call('GET', '/get_load')).body.map((load: { dp_rank: number }) => load.dp_rank), [0, 1])
  t.same((await call('GET', '/v1/loads')).body.loads.map((load: { dp_rank: number }) => load.dp_rank), [0, 1])
  const metrics = (await call('GET', '/metrics')).body as string
  for (const rank of [0, 1]) t.match(metrics, new RegExp(`^sglang:num_running_reqs{.*dp_rank="${rank}"`, 'm'))

  const generate = async (fields: object): Promise<any> => (await call('POST', '/generate', ask('12+34=', fields))).body
  for (const rank of [1, 0]) t.equal((await generate({ routed_dp_rank: rank })).meta_info.dp_rank, rank)
  t.match(await generate({ routed_dp_rank: 2 }), { message: /a data-parallel rank from 0 to 1, got 2/ })
  const chat = (await call('POST', '/v1/chat/completions', {
    messages: [{ role: 'user', content: '1+1=' }],
    max_tokens: 1,
    return_meta_info: true,
    routed_dp_rank: 1
  }))
    .body
  t.equal(chat.choices[0].meta_info.dp_rank, 1)

  const checksums = async (): Promise<Record<string, string>[]> => {
    const { status, body } = await call('POST', '/weights_checker', { action: 'checksum' })
    t.equal(status, 200)
    return Object.values(body.engines as Record<string, { checksums: Record<string, string> }>).map(one =>
      one.checksums
    )
  }
  const [base] = await checksums()
  for (const model of ['adder', 'adder-base', 'adder']) {
    const updated = await call('POST', '/update_weights_from_disk', {
      model_path: join(folder, model),
      weight_version: model
    })
    t.match(updated, { status: 200, body: { success: true } })
    const [first, second] = await checksums()
    t.same(first, second)
    t.equal(JSON.stringify(first) === JSON.stringify(base), model === 'adder-base')
    for (const rank of [0, 1]) {
      const { text, meta_info: info } = await generate({ routed_dp_rank: rank })
      t.equal(info.weight_version, model)
      if (model === 'adder') t.equal(text, '46')
    }
  }

  t.equal((await call('POST', '/release_memory_occupation', { tags: ['kv_cache'] })).status, 200)
  const waiting = generate({ routed_dp_rank: 1 })
  t.equal((await call('POST', '/resume_memory_occupation', { tags: ['kv_cache'] })).status, 200)
  t.equal((await waiting).text, '46', 'a request waits for the memory of its engine')

  await call('POST', '/pause_generation', { mode: 'in_place' })
  const paused = [0, 1].map(async rank => await generate({ routed_dp_rank: rank }))
  await until(async () =>
    (await call('GET', '/get_load')).body.every((load: { num_waiting_reqs: number }) => load.num_waiting_reqs === 1)
  )
  await call('POST', '/abort_request', { abort_all: true })
  for (const reply of await Promise.all(paused)) t.equal(reply.meta_info.finish_reason.type, 'abort')
  await call('POST', '/continue_generation')

  const [own, ...others] = [child.pid!, ...pids()]
  t.equal(new Set([own, ...others]).size, 3, 'each engine has a process of its own')
  child.kill('SIGTERM')
  t.same(await exit, [0, null])
  t.notOk(others.some(isAlive), 'the engines end with the server')
  for (const rank of [0, 1]) t.ok(lines.some(({ msg }) => msg === `engine ${rank}: shut down`))
  t.notMatch(JSON.stringify(lines), new RegExp(KEY))
})

t.test('an engine that is killed is started again, with the current weights', async t => {
  const folder = modelFolder(t)
  const { child, call, lines, exit, pids } = await replicasOf(t, folder)
  await call('POST', '/update_weights_from_disk', { model_path: join(folder, 'adder'), weight_version: 'step-1' })
  const before = (await call('GET', '/workers')).body.workers.map((worker: { url: string }) => worker.url)
  const [kept, killed] = pids()
  process.kill(killed!, 'SIGKILL')
  await until(() => !isAlive(killed!))
  const other = (await call('POST', '/generate', ask('12+34='))).body
  t.match(other, { text: '46', meta_info: { dp_rank: 0 } }, 'the other engine serves meanwhile')
  await until(async () => (await call('GET', '/ready')).status === 200 && pids()[1] !== killed)
  const again = (await call('POST', '/generate', ask('12+34=', { routed_dp_rank: 1 }))).body
  t.match(again, { text: '46', meta_info: { dp_rank: 1, weight_version: 'step-1' } })
  t.same((await call('GET', '/workers')).body.workers.map((worker: { url: string }) => worker.url), before)
  t.ok(lines.some(({ msg }) => msg === 'engine 1 ended with SIGKILL'))

  const updated = await call('POST', '/update_weights_from_disk', { model_path: join(folder, 'adder-base') })
  t.equal(updated.status, 200)
  t.equal(Object.keys(updated.body.engines).length, 2, 'it takes updates again')

  for (const pid of [kept!, pids()[1]!]) process.kill(pid, 'SIGKILL')
  t.same(await exit, [1, null], 'the server ends with its last engine')
  t.ok(lines.some(({ msg }) => /^no engine is left; ending with exit code 1$/.test(msg)))
  t.equal(child.exitCode, 1)
})

t.test('the engines end when the server is killed', async t => {
  const { child, exit, pids } = await replicasOf(t, modelFolder(t))
  const engines = pids()
  child.kill('SIGKILL')
  await exit
  await until(() => !engines.some(isAlive))
  t.pass('no engine is left')
})

t.test('an engine that cannot start ends the server with its reason', async t => {
  const folder = modelFolder(t)
  const env = { PATH: process.env.PATH, HOME: '/nonexistent', REFIT_CUDA_LIBRARY: '/nonexistent/librefit_cuda.so' }
  const run = spawnSync(
    process.execPath,
    [...MAIN, 'serve', join(folder, 'adder'), ...FLAGS, '--device', 'cuda', '--log-level', 'silent'],
    { encoding: 'utf8', env }
  )
  t.match(run, { status: 2, stderr: /^refit: engine [01]: --device cuda: .*does not exist/ })
})
