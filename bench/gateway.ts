import { spawn } from 'node:child_process'
import type { ChildProcess } from 'node:child_process'
import { dirname, join } from 'node:path'
import { createInterface } from 'node:readline'
import { Pool } from 'undici'
import { packageRoot } from '../src/root.ts'
import { median } from './lib/baseline.ts'
import { randomModel } from './lib/random-model.ts'
import { report } from './lib/table.ts'

// What a gateway adds to a request and to an update, and what four engines take longer than one. Engines and gateway are processes of
// their own, as in use. usage: node dist/bench/gateway.js

const children: ChildProcess[] = []

async function start (...args: string[]): Promise<string> {
  const child = spawn(process.execPath, [join(packageRoot, 'bin/refit.js'), ...args, '--port', '0'], { stdio: ['ignore', 'pipe', 'inherit'] })
  children.push(child)
  return await new Promise((resolve, reject) => {
    createInterface({ input: child.stdout! }).on('line', line => {
      const ready = /is ready on (http:\S+?)"/.exec(line)
      if (ready !== null) resolve(ready[1]!)
    })
    child.once('exit', code => { reject(new Error(`refit ${args.join(' ')} ended with ${code}`)) })
  })
}

/** Milliseconds of a call, over one connection that stays. */
function caller (url: string): (path: string, body: object) => Promise<number> {
  const pool = new Pool(url, { connections: 1, headersTimeout: 0, bodyTimeout: 0 })
  return async (path, body) => {
    const began = performance.now()
    const reply = await pool.request({ method: 'POST', path, headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) })
    const text = await reply.body.text()
    if (reply.statusCode !== 200) throw new Error(`${path} answered ${reply.statusCode}: ${text.slice(0, 500)}`)
    return performance.now() - began
  }
}

try {
  // Requests: one engine alone, and the same through a gateway, in turns.
  const adder = join(packageRoot, 'models/adder')
  const one = await start('serve', adder, '--threads', '1')
  const direct = caller(one)
  const through = caller(await start('gateway', '--engine', one))
  const times = { direct: [] as number[], through: [] as number[] }
  for (let i = 0; i < 1500; i++) {
    const body = { input_ids: [10 + i % 10, 10 + i % 7, 12, 13], sampling_params: { max_new_tokens: 1, temperature: 0, ignore_eos: true } }
    const [a, b] = [await direct('/generate', body), await through('/generate', body)]
    if (i < 300) continue
    times.direct.push(a)
    times.through.push(b)
  }
  const added = median(times.through) - median(times.direct)

  // Updates: a model of random weights, from disk, on one engine and on four, each alone on its turn.
  const [first, second] = [randomModel(1), randomModel(2)]
  const urls: string[] = []
  for (let i = 0; i < 4; i++) urls.push(await start('serve', first, '--threads', '1', '--skip-tokenizer-init', '--model-root', dirname(first), '--max-total-tokens', '64'))
  const engines = urls.map(caller)
  const gatewayOfOne = caller(await start('gateway', '--engine', urls[0]!))
  const gatewayOfFour = caller(await start('gateway', ...urls.flatMap(url => ['--engine', url])))
  const updates = { one: [] as number[], oneThrough: [] as number[], four: [] as number[], fourThrough: [] as number[] }
  for (let i = 0; i < 12; i++) {
    const body = { model_path: i % 2 === 0 ? second : first, weight_version: String(i) }
    const one = await engines[0]!('/update_weights_from_disk', body)
    const oneThrough = await gatewayOfOne('/update_weights_from_disk', body)
    const began = performance.now()
    await Promise.all(engines.map(async call => await call('/update_weights_from_disk', body)))
    const four = performance.now() - began
    const fourThrough = await gatewayOfFour('/update_weights_from_disk', body)
    if (i < 2) continue
    updates.one.push(one)
    updates.oneThrough.push(oneThrough)
    updates.four.push(four)
    updates.fourThrough.push(fourThrough)
  }
  const [ms1, ms1through, ms4, ms4through] = [median(updates.one), median(updates.oneThrough), median(updates.four), median(updates.fourThrough)]
  const ms = (value: number): string => `${value.toFixed(2)} ms`
  report('gateway', [
    { figure: 'a request through the gateway, beyond the same without', ours: `${added.toFixed(3)} ms (${median(times.through).toFixed(3)} and ${median(times.direct).toFixed(3)})`, other: '1 ms allowed', ratio: 1 / added, goal: 1 },
    { figure: 'update of four engines (1.14 GB each from disk) through the gateway', ours: ms(ms4through), other: `${ms(ms4)} by four calls at once; 5 % more allowed`, ratio: 1.05 * ms4 / ms4through, goal: 1 },
    { figure: 'update of four engines, against one, both through a gateway', ours: ms(ms4through), other: `${ms(ms1through)} (${ms(ms1)} without); 1.2 times allowed where engines share no cores or memory`, ratio: 1.2 * ms1through / ms4through, goal: 1 }
  ])
} finally {
  for (const child of children) child.kill()
}
