import t from 'tap'
import { joinRegex } from './helpers/join-regex.ts'
import type { Test } from 'tap'
import { spawn, spawnSync } from 'node:child_process'
import type { ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import { createServer } from 'node:net'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import { packageRoot } from '../src/root.ts'

const isSource = import.meta.url.endsWith('.ts')
const FAULTY = join(packageRoot, 'build/faults/refit.node')
const MAIN = [
  ...isSource ? process.execArgv : [],
  fileURLToPath(new URL(`../src/main${isSource ? '.ts' : '.js'}`, import.meta.url))
]
const MODEL = join(packageRoot, 'test', 'goldens', 'qwen3')
const ENVIRONMENT = { PATH: process.env.PATH, HOME: '/nonexistent' }

interface Server {
  child: ChildProcess
  url: string
  lines: Record<string, any>[]
  exit: Promise<unknown[]>
}

function refit (...args: string[]): { status: number | null, stdout: string, stderr: string } {
  return spawnSync(process.execPath, [...MAIN, ...args], { encoding: 'utf8', env: ENVIRONMENT })
}

async function serve (
  t: Test,
  args: string[],
  env: Record<string, string> = {},
  options: string[] = [],
  model = MODEL
): Promise<Server> {
  const child = spawn(
    process.execPath,
    [...options, ...MAIN, 'serve', model, '--port', '0', '--threads', '1', ...args],
    { env: { ...ENVIRONMENT, ...env }, stdio: ['ignore', 'pipe', 'pipe'] }
  )
  t.teardown(() => child.kill('SIGKILL'))
  const exit = once(child, 'exit')
  const lines: Record<string, any>[] = []
  let stderr = ''
  child.stderr.on('data', chunk => {
    stderr += chunk
  })
  const url = await new Promise<string>((resolve, reject) => {
    createInterface({ input: child.stdout }).on('line', line => {
      const entry = JSON.parse(line) as Record<string, any>
      lines.push(entry)
      const ready = /is ready on (http:\S+)/.exec(entry.msg)
      if (ready !== null) resolve(ready[1]!)
    })
    child.once('exit', code => reject(new Error(`ended with ${code}: ${stderr}`)))
  })
  return { child, url, lines, exit }
}

const post = async (url: string, body: object, headers = {}): Promise<{ status: number, body: any }> => {
  const reply = await fetch(url, {
    method: 'POST',
    body: JSON.stringify(body),
    headers: { 'content-type': 'application/json', ...headers }
  })
  return { status: reply.status, body: await reply.json() }
}

async function untilOneWaits (url: string): Promise<void> {
  for (;;) {
    const { loads } = await (await fetch(`${url}/v1/loads`)).json() as { loads: { num_waiting_reqs: number }[] }
    if (loads[0]!.num_waiting_reqs > 0) return
  }
}

t.test('help and version are printed, and wrong calls end with 2 and one line of advice', async t => {
  t.match(refit('--help'), { status: 0, stdout: /serve MODEL/, stderr: '' })
  t.match(refit('serve', 'x', '--help'), { status: 0, stdout: /--max-running-requests N/, stderr: '' })
  t.match(refit('help', 'serve'), { status: 0, stdout: /--port/ })
  t.match(refit('--version'), { status: 0, stdout: /^\d+\.\d+\.\d+\n$/, stderr: '' })
  t.match(refit(), { status: 2, stdout: '', stderr: /Usage: refit COMMAND/ })
  for (
    const [args, message] of [
      [['sevre', 'x'], /^refit: unknown command "sevre"; did you mean "refit serve"\?\n$/],
      [['--port', '1'], /options come after a command/],
      [['serve'], /^refit: serve needs a MODEL: .*\n$/],
      [['serve', 'x', '--prot', '1'], /^refit: --prot: unknown option; did you mean --port\?\n$/],
      [['serve', 'x', '--port', '99999'], /^refit: --port: expected an integer from 0 to 65535, got 99999\n$/],
      [['serve', 'Qwen/Qwen3-0.6B'], /hf download Qwen\/Qwen3-0\.6B\n$/],
      [['serve', MODEL, '--host', '0.0.0.0'], /can be reached by others/],
      [['serve', MODEL, '--tokenizer-path', '/nonexistent'], /tokenizer/],
      [
        ['gateway', '--engine', 'http://127.0.0.1:1', '--engine', 'foo'],
        /^refit: --engine: "foo" is not the address of an engine: expected http:\/\/host:port, .*\n$/
      ]
    ] as const
  ) {
    const { status, stderr } = refit(...args)
    t.equal(status, 2, args.join(' '))
    t.match(stderr, message)
    t.notMatch(stderr, /\n\s+at /)
  }
})

t.test('a port in use stops the start before the model is loaded', async t => {
  const taken = createServer()
  await new Promise<void>(resolve => taken.listen(0, '127.0.0.1', resolve))
  t.teardown(() => taken.close())
  const { port } = taken.address() as AddressInfo
  const { status, stdout, stderr } = refit('serve', MODEL, '--port', String(port))
  t.equal(status, 2)
  t.match(stderr, `port ${port} of 127.0.0.1 is in use`)
  t.notMatch(stdout, /loaded in/)
})

t.test('a model that cannot be loaded ends with 1 and no stack', async t => {
  const folder = t.testdir({ 'config.json': '{"architectures": ["GPT2LMHeadModel"]}' })
  const { status, stderr } = refit('serve', folder)
  t.equal(status, 1)
  t.match(stderr, /^refit: .*GPT2LMHeadModel/)
  t.notMatch(stderr, /\n\s+at /)
})

t.test('the log says that a checkpoint in float16 is held in bfloat16, unless --dtype chooses that', async t => {
  const model = join(packageRoot, 'test/goldens/qwen3-sharded-fp16')
  for (const [args, count] of [[[], 1], [['--dtype', 'bfloat16'], 0]] as const) {
    const { child, lines, exit } = await serve(t, ['--skip-tokenizer-init', ...args], {}, [], model)
    t.equal(lines.filter(({ msg }) => /float16 and is held in bfloat16: .*--dtype float16/.test(msg)).length, count)
    child.kill('SIGTERM')
    await exit
  }
})

t.test('serves until SIGTERM, and logs its configuration without the keys', async t => {
  const { child, url, lines, exit } = await serve(t, [
    '--served-model-name',
    'tiny',
    '--weight-version',
    'v1',
    '--admin-api-key',
    'hunter3'
  ], { REFIT_API_KEY: 'hunter2', REFIT_MODEL_ROOTS: 'x' })
  const authorization = 'Bearer hunter2'
  t.equal((await fetch(`${url}/health`)).status, 200)
  t.equal((await post(`${url}/generate`, { input_ids: [1, 2, 3] })).status, 401)
  const { status, body } = await post(`${url}/generate`, {
    input_ids: [1, 2, 3],
    sampling_params: { max_new_tokens: 4, temperature: 0, ignore_eos: true }
  }, { authorization })
  t.equal(status, 200)
  t.match(body, {
    output_ids: [Number, Number, Number, Number],
    meta_info: { weight_version: 'v1', completion_tokens: 4 }
  })
  t.match(await (await fetch(`${url}/v1/models`, { headers: { authorization } })).json(), { data: [{ id: 'tiny' }] })
  t.equal(
    (await post(`${url}/update_weights_from_disk`, { model_path: MODEL }, { authorization })).status,
    401,
    'the key for weights is another one'
  )
  t.match(await post(`${url}/update_weights_from_disk`, { model_path: MODEL }, { authorization: 'Bearer hunter3' }), {
    status: 200,
    body: { success: true }
  }, 'from the folder that holds the model')
  t.equal(
    (await post(`${url}/update_weights_from_disk`, { model_path: packageRoot }, { authorization: 'Bearer hunter3' }))
      .status,
    400,
    'from outside'
  )

  child.kill('SIGTERM')
  t.same(await exit, [0, null])
  t.match(lines.find(({ config }) => config !== undefined), {
    config: { 'api-key': '***', 'admin-api-key': '***', 'served-model-name': 'tiny', threads: 1 }
  })
  t.notMatch(JSON.stringify(lines), /hunter/)
  for (
    const message of [
      /REFIT_MODEL_ROOTS is not a variable/,
      /no tokenizer\.json: only token ids/,
      /^loaded in .*Qwen3ForCausalLM in .* on cpu/,
      /SIGTERM: shutting down/,
      /^shut down$/
    ]
  ) {
    t.ok(lines.some(({ msg }) => message.test(msg)), String(message))
  }
})

t.test('after SIGINT a waiting request is aborted when its grace has passed, and the exit is clean', async t => {
  const { child, url, lines, exit } = await serve(t, [
    '--shutdown-timeout',
    '0.2',
    '--model-root',
    MODEL,
    '--model-root',
    '/nonexistent/weights',
    '--model-root',
    join(MODEL, 'config.json')
  ])
  t.same(lines.map(({ msg }) => /^--model-root: .*\/(.*;)/.exec(msg)?.[1]).filter(Boolean), [
    'weights does not exist;',
    'config.json is no folder;'
  ], 'roots that are no folders are reported at the start')
  await post(`${url}/pause_generation`, { mode: 'in_place' })
  const waiting = post(`${url}/generate`, { input_ids: [1, 2, 3], rid: 'a' })
  await untilOneWaits(url)
  child.kill('SIGINT')
  t.match((await waiting).body, { meta_info: { finish_reason: { type: 'abort' } } })
  t.same(await exit, [0, null])
  t.ok(lines.some(({ msg }) => /1 requests did not end in time/.test(msg)))
})

t.test('a second signal ends at once', async t => {
  const { child, url, lines, exit } = await serve(t, ['--shutdown-timeout', '600'])
  await post(`${url}/pause_generation`, { mode: 'in_place' })
  const waiting = post(`${url}/generate`, { input_ids: [1, 2, 3] }).catch(() => 'cut')
  await untilOneWaits(url)
  child.kill('SIGINT')
  while (!lines.some(({ msg }) => msg === 'SIGINT: shutting down')) await new Promise(resolve => setImmediate(resolve))
  child.kill('SIGINT')
  t.same(await exit, [1, null])
  t.equal(await waiting, 'cut')
})

t.test('devices reports why no GPU can be used, as text or JSON, and ends with 1', async t => {
  const env = { ...ENVIRONMENT, REFIT_CUDA_LIBRARY: '/nonexistent/librefit_cuda.so' }
  const run = (...args: string[]) =>
    spawnSync(process.execPath, [...MAIN, 'devices', ...args], { encoding: 'utf8', env })
  t.match(run(), {
    status: 1,
    stdout: /^no GPU can be used: .*\/nonexistent\/librefit_cuda\.so does not exist/,
    stderr: ''
  })
  const { status, stdout } = run('--json')
  t.equal(status, 1)
  t.match(JSON.parse(stdout), { cards: [], error: /does not exist/ })
  t.match(run('--jason'), { status: 2, stderr: /--jason: unknown option/ })
  t.match(refit('devices', '--help'), { status: 0, stdout: /Usage: refit devices/ })
  t.match(spawnSync(process.execPath, [...MAIN, 'serve', MODEL, '--device', 'cuda'], { encoding: 'utf8', env }), {
    status: 2,
    stderr: /^refit: --device cuda: .*does not exist.*\n$/
  })
})

/** Runs before the program: the k-th step of the engine fails or stalls. */
function faultAtStep (fault: object): string[] {
  const source = `import { createRequire } from 'node:module'; createRequire(${JSON.stringify(FAULTY)})(${
    JSON.stringify(FAULTY)
  }).armFault(${JSON.stringify(fault)})`
  return ['--import', `data:text/javascript,${encodeURIComponent(source)}`]
}

for (
  const [how, fault, args, message] of [
    [
      'fails',
      { point: 'step', at: 4, action: 'fail' },
      [],
      /^device lost: injected fault: rank 0 is lost in a step; requests in the step: met. Ending with exit code 70$/
    ],
    [
      'never ends',
      { point: 'step', at: 4, action: 'stall', stallMs: 600_000 },
      ['--watchdog-timeout', '1'],
      joinRegex(
        /^device lost: a step has not ended within 1 s \(--watchdog-timeout\); requests in the step:/,
        / met. Ending with exit code 70$/
      )
    ]
  ] as const
) {
  t.test(
    `a step that ${how} fails its request with the reason, logs one fatal line, ` +
      'and ends the process with 70',
    async t => {
      const { url, lines, exit } = await serve(t, [...args], { REFIT_NATIVE: FAULTY }, faultAtStep(fault))
      const reply = await post(`${url}/generate`, {
        input_ids: [1, 2, 3],
        rid: 'met',
        sampling_params: { max_new_tokens: 100, ignore_eos: true }
      })
      t.match(reply, { status: 503, body: { error: { code: 'DEVICE_LOST' } } })
      t.same(await exit, [70, null])
      const fatal = lines.filter(({ level }) => level === 60)
      t.equal(fatal.length, 1)
      t.match(fatal[0], { code: 'DEVICE_LOST', msg: message })
    }
  )
}
