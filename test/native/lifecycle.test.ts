import { closeSync, readdirSync } from 'node:fs'
import { Worker } from 'node:worker_threads'
import { once } from 'node:events'
import { setImmediate } from 'node:timers/promises'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'
import t from 'tap'
import { TENSOR_WRITTEN } from '../../src/native/write-layout.ts'
import { faultyAddon } from '../helpers/core.ts'
import { codedJob, expectedParams } from './helpers/coded.ts'
import { plainModel, readAll } from './helpers/plain-core.ts'
import { configSource, FAULTY, runAlone, runScript } from './helpers/run-script.ts'

setFlagsFromString('--expose-gc')
const collect = runInNewContext('gc') as () => void
const addon = faultyAddon()
const model = plainModel({ ranks: 2, hidden: 128 })

/** Waits until the armed fault has acted: a stall has begun. */
async function untilPassed (): Promise<void> {
  while (addon.faultPending!()) await setImmediate()
}

/** A write of the last parameter, in scripts. */
const NORM = '{ sources: [{ buffer: new Uint8Array(256) }], tensors: Float64Array.of(0, 0, 0, 128, 1, 2, 2), ' +
  'rects: Float64Array.of(0, 0, 7, 0, 0, 128, 1, 0, 0) }'

t.test('closing waits for running writes, and they succeed', async t => {
  const core = addon.createCore(model.config)
  const before = await readAll(addon, core, model)
  const coded = codedJob(model.tensors, { folder: t.testdir() })
  // closeCore blocks this thread, so another thread ends the stall a while after it has begun.
  const moment = new Int32Array(new SharedArrayBuffer(4))
  const ender = new Worker(
    `
    const { parentPort, workerData: moment } = require('node:worker_threads')
    const addon = require(${JSON.stringify(FAULTY)})
    parentPort.postMessage('ready')
    Atomics.wait(moment, 0, 0)
    Atomics.wait(moment, 0, 1, 200)
    Atomics.store(moment, 0, 2)
    addon.armFault(null)`,
    { eval: true, workerData: moment }
  )
  const ended = once(ender, 'exit')
  await once(ender, 'message')
  addon.armFault!({ point: 'read', at: 1, action: 'stall', stallMs: 600_000 })
  const order: string[] = []
  const first = addon.write(core, coded.job).then(outcome => {
    order.push('first')
    return outcome
  })
  const read = readAll(addon, core, model)
  Atomics.store(moment, 0, 1)
  Atomics.notify(moment, 0)
  addon.closeCore(core)
  t.equal(Atomics.load(moment, 0), 2, 'it waited')
  order.push('closed')
  t.throws(() => addon.coreInfo(core), { message: `no core has handle ${core}: it was never created, or closed` })
  t.throws(() => addon.closeCore(core), { message: /it was never created, or closed/ })
  const outcome = await first
  t.ok(outcome.states.every(state => state === TENSOR_WRITTEN))
  t.strictSame(
    await read,
    expectedParams(model, model.tensors, 'bfloat16', before),
    'what was queued behind it ran too'
  )
  t.strictSame(order, ['closed', 'first'])
  await ended
  closeSync(coded.fd!)
})

t.test('parameters keep their addresses through writes and scrambling', async t => {
  const core = addon.createCore(model.config)
  const { addresses, weightBytes, kvBytes } = addon.coreInfo(core)
  t.equal(addresses.length, 2 * model.config.params.length)
  t.equal(new Set(addresses).size, addresses.length)
  t.ok(addresses.every(address => address % 64n === 0n && address !== 0n))
  t.ok(weightBytes >= 2 * 2 * model.config.params.reduce((sum, { rows, cols }) => sum + rows * cols, 0))
  t.ok(kvBytes > 0)
  await addon.write(core, codedJob(model.tensors).job)
  await addon.scramble(core, 2n ** 64n - 1n)
  t.strictSame(addon.coreInfo(core).addresses, addresses)
  addon.closeCore(core)
})

t.test('a core belongs to the process: a worker creates it, main writes it, and it outlives the worker', async t => {
  const worker = new Worker(
    `
    const { parentPort } = require('node:worker_threads')
    const addon = require(${JSON.stringify(FAULTY)})
    parentPort.postMessage(addon.createCore(${configSource(model.config)}))`,
    { eval: true }
  )
  const [core] = await once(worker, 'message') as [number]
  const writing = addon.write(core, codedJob(model.tensors).job)
  const [code] = await once(worker, 'exit') as [number]
  t.equal(code, 0, 'native threads do not keep a worker alive')
  const before = (await readAll(addon, core, model)).map(bytes => new Uint8Array(bytes.length))
  t.notOk((await writing).error)
  t.strictSame(await readAll(addon, core, model), expectedParams(model, model.tensors, 'bfloat16', before))
  addon.closeCore(core)
})

/** Above 32 MiB every allocation is a mapping of its own, so an access after it is freed crashes. */
const MAPPED = 64 << 20

t.test('a worker that ends with a write under way ends the write and waits until its memory is free', async t => {
  const core = addon.createCore(model.config)
  addon.armFault!({ point: 'copy', at: 1, action: 'stall', stallMs: 600_000 })
  const worker = new Worker(
    `
    const { parentPort, workerData } = require('node:worker_threads')
    const addon = require(${JSON.stringify(FAULTY)})
    const tensors = Float64Array.of(0, 0, 0, 128, 1, 2, 2)
    const rects = Float64Array.of(0, 0, 7, 0, 0, 128, 1, 0, 0)
    addon.write(workerData, { sources: [{ buffer: new Uint8Array(${MAPPED}).fill(7) }], tensors, rects })
    addon.write(workerData, ${NORM})
    parentPort.postMessage('under way')
    setInterval(() => {}, 1000)`,
    { eval: true, workerData: core }
  )
  await once(worker, 'message')
  await untilPassed()
  // The stall lasts until the worker's environment begins to end, and waits.
  addon.armFault!({ point: 'end', at: 1, action: 'fail' })
  const terminated = worker.terminate()
  await untilPassed()
  addon.armFault!(null)
  await terminated
  t.strictSame(
    await addon.read(core, 0, 7, 0, 0, 128, 1),
    new Uint8Array(256).fill(7),
    'the first ended, the queued one never began'
  )
  addon.closeCore(core)
})

t.test('calls that a worker queued before it ended do not touch its memory afterwards', async t => {
  const core = addon.createCore(plainModel({ hidden: 512, vocab: MAPPED / 1024 }).config)
  addon.armFault!({ point: 'copy', at: 1, action: 'stall', stallMs: 600_000 })
  // Main's own write occupies the thread, so the worker's reads, each into 64 MiB of the worker's memory, are all
  // queued behind it.
  const writing = addon.write(core, {
    sources: [{ buffer: new Uint8Array(2) }],
    tensors: Float64Array.of(0, 0, 0, 1, 1, 2, 2),
    rects: Float64Array.of(0, 0, 7, 0, 0, 1, 1, 0, 0)
  })
  const worker = new Worker(
    `
    const { parentPort, workerData } = require('node:worker_threads')
    const addon = require(${JSON.stringify(FAULTY)})
    for (let i = 0; i < 3; i++) addon.read(workerData, 0, 0, 0, 0, ${MAPPED / 1024}, 512)
    parentPort.postMessage('queued')
    setInterval(() => {}, 1000)`,
    { eval: true, workerData: core }
  )
  await once(worker, 'message')
  await worker.terminate()
  addon.armFault!(null)
  t.notOk((await writing).error, 'the write of main is not concerned')
  t.equal((await addon.read(core, 0, 7, 0, 0, 1, 1)).length, 2)
  addon.closeCore(core)
})

t.test('workers that only load the addon can end repeatedly', async t => {
  for (let i = 0; i < 10; i++) {
    const worker = new Worker(`require(${JSON.stringify(FAULTY)}).isas()`, { eval: true })
    t.strictSame(await once(worker, 'exit'), [0])
  }
})

t.test('a worker that alone loaded the addon may end while native threads run its code', t => {
  // The main thread never loads the addon here: without -z nodelete the library would be unmapped while the core's
  // threads run.
  const ran = runAlone(`
    const { Worker } = require('node:worker_threads')
    const worker = new Worker(\`
      const { parentPort } = require('node:worker_threads')
      const addon = require(${JSON.stringify(FAULTY)})
      const core = addon.createCore(${configSource(model.config)})
      addon.armFault({ point: 'read', at: 1, action: 'stall', stallMs: 300 })
      addon.write(core, ${
    NORM.replace('{ buffer: new Uint8Array(256) }', '{ fd: require("node:fs").openSync("/dev/zero", "r") }')
  })
      setTimeout(() => process.exit(4), 50)\`, { eval: true })
    worker.on('exit', code => setTimeout(() => console.log('worker ended with', code), 500))`)
  t.strictSame([ran.status, ran.signal, ran.stdout, ran.stderr], [0, null, 'worker ended with 4\n', ''])
  t.end()
})

t.test('process.exit in the middle of a write ends at once and cleanly', t => {
  for (const source of [`{ buffer: new Uint8Array(${MAPPED}) }`, '{ fd: fs.openSync("/dev/zero", "r") }']) {
    const ran = runScript(
      model.config,
      `
      const fs = require('node:fs')
      const core = addon.createCore(config)
      const job = ${NORM.replace(/\{ buffer: [^}]*\}/, source)}
      addon.armFault({ point: ${source.includes('fd') ? "'read'" : "'copy'"}, at: 1, action: 'stall', stallMs: 300 })
      addon.write(core, job)
      for (let i = 0; i < 50; i++) addon.write(core, job)
      addon.checksum(core, Float64Array.of(0, 0, 7, 0, 0, 128, 1, 0, 0), Float64Array.of(1))
      addon.read(core, 0, 0, 0, 0, 4, 4)
      setTimeout(() => process.exit(7), 50)`
    )
    t.strictSame([ran.status, ran.signal, ran.stderr], [7, null, ''], source)
  }
  t.end()
})

t.test('a pending promise keeps the process alive, an idle core does not', t => {
  const ran = runScript(
    model.config,
    `
    const core = addon.createCore(config)
    addon.armFault({ point: 'copy', at: 1, action: 'stall', stallMs: 200 })
    addon.write(core, ${NORM}).then(outcome => console.log('written', outcome.states[0]))`
  )
  t.strictSame([ran.status, ran.stdout, ran.stderr], [0, 'written 2\n', ''])
  t.end()
})

t.test('an exception in a continuation of a write is an ordinary unhandled rejection', t => {
  const ran = runScript(
    model.config,
    `
    const core = addon.createCore(config)
    process.on('unhandledRejection', error => { console.log(error.message); process.exit(5) })
    addon.write(core, ${NORM}).then(() => { throw new Error('mine') })`
  )
  t.strictSame([ran.status, ran.stdout], [5, 'mine\n'])
  t.end()
})

t.test('memory, descriptors and threads stay flat over 300 writes', async t => {
  const core = addon.createCore(model.config)
  const file = codedJob(model.tensors, { folder: t.testdir(), dtype: 'float32' })
  const coded = codedJob(model.tensors)
  // A leak must be large enough to show: every memory write has a buffer of its own (0.3 MB), every checksum 8000
  // rectangles (0.6 MB).
  const rects = Float64Array.from({ length: 8000 * 9 }, (_, i) => i % 9 === 5 || i % 9 === 6 ? 1 : 0)
  const round = async (n: number): Promise<number> => {
    for (let i = 0; i < n; i++) {
      const { job } = i % 2 === 0
        ? file
        : {
          job: {
            ...coded.job,
            sources: [{ buffer: Uint8Array.from((coded.job.sources[0] as { buffer: Uint8Array }).buffer) }]
          }
        }
      if ((await addon.write(core, job)).error !== undefined) t.fail('a write failed')
      await addon.checksum(core, rects, Float64Array.of(64))
      await addon.read(core, 0, 0, 0, 0, 8, 8)
      if (i % 20 === 0) {
        collect()
        await setImmediate()
      }
    }
    collect()
    await setImmediate()
    return process.memoryUsage().rss
  }
  const counts = (): [
    fds: number,
    threads: number
  ] => [readdirSync('/proc/self/fd').length, readdirSync('/proc/self/task').length]
  const rss = await round(100)
  const before = counts()
  const more = (await round(300) - rss) / 1e6
  t.strictSame(counts(), before)
  t.ok(more < 25, `${more} MB more`)
  closeSync(file.fd!)
  addon.closeCore(core)
})

t.test('cores can be created and closed repeatedly without leaving threads or memory', async t => {
  const threads = (): number => readdirSync('/proc/self/task').length
  addon.closeCore(addon.createCore(model.config))
  const [before, rss] = [threads(), process.memoryUsage().rss]
  const big = plainModel({ hidden: 512, vocab: 16384, threads: 4 })
  for (let i = 0; i < 20; i++) {
    const core = addon.createCore(big.config)
    await addon.scramble(core, 1n)
    addon.closeCore(core)
  }
  t.equal(threads(), before)
  t.ok(
    process.memoryUsage().rss - rss < 60e6,
    `${(process.memoryUsage().rss - rss) / 1e6} MB more after 20 cores of 17 MB`
  )
})
