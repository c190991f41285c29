import { spawnSync } from 'node:child_process'
import { closeSync } from 'node:fs'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import t from 'tap'
import type { Test } from 'tap'
import { packageRoot } from '../../src/root.ts'
import { TENSOR_PARTIAL, TENSOR_UNTOUCHED, TENSOR_WRITTEN } from '../../src/native/write-layout.ts'
import type { Fault } from '../../src/native/addon.ts'
import type { DType } from '../../src/native/dtypes.ts'
import type { WriteOutcome } from '../../src/native/write-job.ts'
import { faultyAddon } from '../helpers/core.ts'
import { codedJob, expectedParams } from './helpers/coded.ts'
import { plainModel, readAll } from './helpers/plain-core.ts'

const addon = faultyAddon()
const arm = addon.armFault!

/**
 * Fails at pass 1, 2, 3 ... of a point until the write succeeds. Each time it compares every parameter with the
 * reported states.
 */
async function sweep (t: Test, point: Fault['point'], dtype: DType, threads: number): Promise<number> {
  const model = plainModel({ ranks: 2, threads, hidden: 256, vocab: 2048, inter: 1024 })
  const core = addon.createCore(model.config)
  const coded = codedJob(model.tensors, { dtype, gap: 1, folder: t.testdir() })
  await addon.scramble(core, 5n)
  const before = await readAll(addon, core, model)
  const wanted = expectedParams(model, model.tensors, dtype, before)
  let failed = 0
  for (let at = 1;; at++) {
    await addon.scramble(core, 5n)
    arm({ point, at, action: 'fail' })
    const outcome = await addon.write(core, coded.job)
    arm(null)
    const after = await readAll(addon, core, model)
    if (outcome.error === undefined) {
      t.ok(outcome.states.every(state => state === TENSOR_WRITTEN))
      t.ok(after.every((bytes, i) => Buffer.compare(bytes, wanted[i]!) === 0))
      break
    }
    failed++
    t.match(outcome.error.message, /^injected fault: /)
    t.not(outcome.states[outcome.error.tensor], TENSOR_WRITTEN)
    check(outcome, at, after)
  }
  closeSync(coded.fd!)
  addon.closeCore(core)
  return failed

  function check (outcome: WriteOutcome, at: number, after: Uint8Array[]): void {
    for (const [i, tensor] of model.tensors.entries()) {
      // Compares only the parts of parameters that this tensor's rectangles cover.
      const differs = (from: Uint8Array[]): boolean =>
        tensor.rects.some(([rank, param, , , rows, cols, dstRow, dstCol]) => {
          const index = rank * model.config.params.length + param
          const width = model.config.params[param]!.cols
          for (let r = dstRow; r < dstRow + rows; r++) {
            const [start, end] = [(r * width + dstCol) * 2, (r * width + dstCol + cols) * 2]
            if (Buffer.compare(after[index]!.subarray(start, end), from[index]!.subarray(start, end)) !== 0) return true
          }
          return false
        })
      const state = outcome.states[i]
      if (state === TENSOR_WRITTEN && differs(wanted)) {
        t.fail(`pass ${at}: ${tensor.name} is said to be written and is not`)
      }
      if (state === TENSOR_UNTOUCHED && differs(before)) {
        t.fail(`pass ${at}: ${tensor.name} is said to be untouched and is not`)
      }
      if (state === TENSOR_PARTIAL && !differs(before)) {
        t.fail(`pass ${at}: ${tensor.name} is said to be partial and is as it was`)
      }
    }
  }
}

t.test('after any failed read, the states match the parameters', async t => {
  t.ok(await sweep(t, 'read', 'bfloat16', 1) > 10)
})

t.test('after any failed read with two threads, the states match the parameters', async t => {
  t.ok(await sweep(t, 'read', 'bfloat16', 2) > 10)
})

t.test('after any failed copy, the states match the parameters', async t => {
  t.ok(await sweep(t, 'copy', 'float32', 2) > 20)
})

t.test('a repeated write heals the weights that a failed write tore', async t => {
  const model = plainModel({ ranks: 2 })
  const core = addon.createCore(model.config)
  const before = await readAll(addon, core, model)
  const coded = codedJob(model.tensors, { folder: t.testdir() })
  arm({ point: 'read', at: 3, action: 'fail' })
  t.ok((await addon.write(core, coded.job)).error)
  t.notOk((await addon.write(core, coded.job)).error, 'a fault acts once')
  t.strictSame(await readAll(addon, core, model), expectedParams(model, model.tensors, 'bfloat16', before))
  closeSync(coded.fd!)
  addon.closeCore(core)
})

t.test('a failed allocation refuses the core, or the write before it begins', async t => {
  const model = plainModel({ ranks: 2 })
  arm({ point: 'alloc', at: 2, action: 'fail' })
  t.throws(() => addon.createCore(model.config), {
    message: /^not enough memory for \d+ MB of weights and 4 KV pages of 16 tokens$/
  })
  arm(null)
  const core = addon.createCore(model.config)
  const before = await readAll(addon, core, model)
  const coded = codedJob(model.tensors, { dtype: 'float32', folder: t.testdir() })
  arm({ point: 'alloc', at: 1, action: 'fail' })
  const outcome = await addon.write(core, coded.job)
  arm(null)
  t.strictSame(outcome.error, { message: 'no memory for read buffers', tensor: -1 })
  t.ok(outcome.states.every(state => state === TENSOR_UNTOUCHED))
  t.strictSame(await readAll(addon, core, model), before)
  closeSync(coded.fd!)
  addon.closeCore(core)
})

t.test('a stalled read delays the write, and the event loop continues', async t => {
  const model = plainModel()
  const core = addon.createCore(model.config)
  const coded = codedJob(model.tensors, { folder: t.testdir() })
  arm({ point: 'read', at: 2, action: 'stall', stallMs: 600_000 })
  let ended = false
  const writing = addon.write(core, coded.job).finally(() => {
    ended = true
  })
  while (addon.faultPending!()) await sleep(1)
  for (let ticks = 0; ticks < 6; ticks++) await sleep(5)
  t.notOk(ended, 'timers ran meanwhile')
  arm(null)
  t.notOk((await writing).error)
  closeSync(coded.fd!)
  addon.closeCore(core)
})

t.test('a fault can end the process in the middle of a write', async t => {
  const model = plainModel()
  const script = `
    const addon = require(${JSON.stringify(join(packageRoot, 'build/faults/refit.node'))})
    const revive = (k, v) => v?.f64 ? Float64Array.from(v.f64) : v?.u8 ? Uint8Array.from(v.u8) : v
    const core = addon.createCore(JSON.parse(process.argv[1], revive))
    addon.armFault({ point: 'copy', at: 1, action: 'die' })
    process.on('exit', () => console.log('exit handlers ran'))
    const tensors = Float64Array.of(0, 0, 0, 64, 1, 2, 2)
    const rects = Float64Array.of(0, 0, 7, 0, 0, 64, 1, 0, 0)
    addon.write(core, { sources: [{ buffer: new Uint8Array(128) }], tensors, rects })
    setInterval(() => {}, 1000)`
  const config = JSON.stringify(
    model.config,
    (_, v) => v instanceof Float64Array ? { f64: [...v] } : v instanceof Uint8Array ? { u8: [...v] } : v
  )
  const { status, stdout, stderr } = spawnSync(process.execPath, ['-e', script, config], {
    encoding: 'utf8',
    timeout: 120_000
  })
  t.equal(status, 134, stderr)
  t.equal(stdout, '')
})

t.test('armFault reports the error of an invalid fault', async t => {
  const bad = (fault: unknown): () => void => () => arm(fault as Fault)
  t.throws(bad({ point: 'write', at: 1, action: 'fail' }), {
    message: 'fault.point: expected one of read, copy, alloc, step, open, event, close, end, begin, result, got "write"'
  })
  t.throws(bad({ point: 'read', at: 1, action: 'burn' }), {
    message: 'fault.action: expected one of fail, stall, slow, die, got "burn"'
  })
  t.throws(bad({ point: 'read', at: 0, action: 'fail' }), { message: /^fault.at: expected an integer from 1/ })
  t.throws(bad({ point: 'read', at: 1, action: 'stall' }), { message: /^fault.stallMs: expected an integer/ })
  t.throws(bad(undefined), { message: /^fault: expected an object, got undefined$/ })
})
