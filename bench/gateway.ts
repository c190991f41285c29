import { spawn } from 'node:child_process'
import type { ChildProcess } from 'node:child_process'
import { dirname, join } from 'node:path'
import { createInterface } from 'node:readline'
import { Pool } from 'undici'
import { packageRoot } from '../src/root.ts'
import { median } from './lib/baseline.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'
import type { Figure } from './lib/table.ts'

// The time that a gateway adds to a request and to an update, and the time that four engines add to that of one.
// Engines and gateway are separate processes, as in production, and are measured in turn. On one machine four engines
// use the same cores and memory, so fan-out is measured twice. With stand-ins (lib/counting-engine.ts) the work uses no
// processor, as on machines and GPUs of their own. With real engines, the same four calls without a gateway are the
// baseline for the gateway's part. usage: node dist/bench/gateway.js [--stand-ins]

const UPDATE = '/update_weights_from_tensor'
/** Milliseconds of a stand-in's work; a trainer's step takes longer. */
const WORK_MS = 300

const children: ChildProcess[] = []

async function start (...args: string[]): Promise<string> {
  return await run(join(packageRoot, 'bin/refit.js'), ...args, '--port', '0')
}

async function run (...args: string[]): Promise<string> {
  const child = spawn(process.execPath, args, { stdio: ['ignore', 'pipe', 'inherit'] })
  children.push(child)
  return await new Promise((resolve, reject) => {
    createInterface({ input: child.stdout! }).on('line', line => {
      const ready = /is ready on (http:\S+?)"/.exec(line)
      if (ready !== null) resolve(ready[1]!)
    })
    child.once('exit', code => {
      reject(new Error(`${args.join(' ')} ended with ${code}`))
    })
  })
}

/** Milliseconds of a call over one open connection. */
function caller (url: string): (path: string, body: object | Buffer) => Promise<number> {
  const pool = new Pool(url, { connections: 1, headersTimeout: 0, bodyTimeout: 0 })
  return async (path, body) => {
    const bytes = Buffer.isBuffer(body) ? body : Buffer.from(JSON.stringify(body))
    const type = Buffer.isBuffer(body) && body[0] !== 0x7b ? 'application/octet-stream' : 'application/json'
    const began = performance.now()
    const reply = await pool.request({ method: 'POST', path, headers: { 'content-type': type }, body: bytes })
    const text = await reply.body.text()
    if (reply.statusCode !== 200) throw new Error(`${path} answered ${reply.statusCode}: ${text.slice(0, 500)}`)
    return performance.now() - began
  }
}

interface Medians {
  one: number
  oneThrough: number
  four: number
  fourThrough: number
}

/**
 * The same on one engine and on four, each without and with a gateway, in turns. The first two rounds are not counted.
 */
async function rounds (
  count: number,
  urls: readonly string[],
  path: string,
  body: (round: number) => object | Buffer
): Promise<Medians> {
  const engines = urls.map(caller)
  const ofOne = caller(await start('gateway', '--engine', urls[0]!))
  const ofFour = caller(await start('gateway', ...urls.flatMap(url => ['--engine', url])))
  const times: Record<keyof Medians, number[]> = { one: [], oneThrough: [], four: [], fourThrough: [] }
  for (let i = 0; i < count + 2; i++) {
    const sent = body(i)
    const one = await engines[0]!(path, sent)
    const oneThrough = await ofOne(path, sent)
    const began = performance.now()
    await Promise.all(engines.map(async call => await call(path, sent)))
    const four = performance.now() - began
    const fourThrough = await ofFour(path, sent)
    if (i < 2) continue
    for (const [name, value] of Object.entries({ one, oneThrough, four, fourThrough }) as [keyof Medians, number][]) {
      times[name].push(value)
    }
  }
  return {
    one: median(times.one),
    oneThrough: median(times.oneThrough),
    four: median(times.four),
    fourThrough: median(times.fourThrough)
  }
}

const ms = (value: number): string => `${value.toFixed(1)} ms`
const added = (what: string, { four, fourThrough }: Medians): Figure => ({
  figure: `${what}, four engines through the gateway`,
  ours: ms(fourThrough),
  other: `${ms(four)} by four calls at once; 5 % more allowed`,
  ratio: 1.05 * four / fourThrough,
  goal: 1
})
const spread = (what: string, { one, oneThrough, fourThrough }: Medians): Figure => ({
  figure: `${what}, four engines against one, both through a gateway`,
  ours: ms(fourThrough),
  other: `${ms(oneThrough)} (${ms(one)} without); 1.2 times allowed`,
  ratio: 1.2 * oneThrough / fourThrough,
  goal: 1
})

try {
  // Requests: one engine alone, and the same through a gateway, in turns.
  const figures: Figure[] = []
  const one = await start('serve', join(packageRoot, 'models/adder'), '--threads', '1')
  const direct = caller(one)
  const through = caller(await start('gateway', '--engine', one))
  const times = { direct: [] as number[], through: [] as number[] }
  for (let i = 0; i < 1500; i++) {
    const body = {
      input_ids: [10 + i % 10, 10 + i % 7, 12, 13],
      sampling_params: { max_new_tokens: 1, temperature: 0, ignore_eos: true }
    }
    const [a, b] = [await direct('/generate', body), await through('/generate', body)]
    if (i < 300) continue
    times.direct.push(a)
    times.through.push(b)
  }
  const more = median(times.through) - median(times.direct)
  figures.push({
    figure: 'a request through the gateway, beyond the same without',
    ours: `${more.toFixed(3)} ms (${median(times.through).toFixed(3)} and ${median(times.direct).toFixed(3)})`,
    other: '1 ms allowed',
    ratio: 1 / more,
    goal: 1
  })

  // Stand-ins: a request of a few bytes (from disk, a broadcast), the handles of 19,000 tensors with an entry per rank,
  // and an upload.
  const standIns = await Promise.all(
    [1, 2, 3, 4].map(async () => await run(join(packageRoot, 'dist/bench/lib/counting-engine.js'), String(WORK_MS)))
  )
  const work = `${WORK_MS} ms of work`
  const small = await rounds(14, standIns, '/update_weights_from_disk', round => ({ model_path: `/step-${round}` }))
  figures.push(added(`an announced update with ${work}`, small), spread(`an announced update with ${work}`, small))
  const handles = Buffer.from(
    JSON.stringify({
      serialized_named_tensors: [1, 2, 3, 4].map(() => 'A'.repeat(2.25e6)),
      load_format: 'flattened_bucket'
    })
  )
  const split = await rounds(14, standIns, UPDATE, () => handles)
  figures.push(added(`9 MB of handles, ${work}`, split), spread(`9 MB of handles, ${work}`, split))
  const file = Buffer.alloc(256e6, 1)
  const upload = await rounds(8, standIns, UPDATE, () => file)
  figures.push({ ...added(`256 MB uploaded, ${work}`, upload), goal: 1 })

  if (!process.argv.includes('--stand-ins')) {
    // Real engines: a model of random weights, from disk.
    const [first, second] = [randomModel(1), randomModel(2)]
    const urls: string[] = []
    for (let i = 0; i < 4; i++) {
      urls.push(
        await start(
          'serve',
          first,
          '--threads',
          '1',
          '--skip-tokenizer-init',
          '--model-root',
          dirname(first),
          '--max-total-tokens',
          '64'
        )
      )
    }
    const real = await rounds(
      10,
      urls,
      '/update_weights_from_disk',
      round => ({ model_path: round % 2 === 0 ? second : first, weight_version: String(round) })
    )
    figures.push(added('1.14 GB from disk on real engines', real))
    console.log(
      `real engines on these cores: one ${ms(real.one)} (${ms(real.oneThrough)} through a gateway), four at once ${
        ms(real.four)
      } (${ms(real.fourThrough)})`
    )
  }
  report('gateway', figures)
} finally {
  for (const child of children) child.kill()
}
