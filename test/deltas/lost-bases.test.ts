import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'
import { serve } from '../helpers/transaction-server.ts'
import type { Reply, Server } from '../helpers/transaction-server.ts'

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

// verl's deltas name no base. A delta after one that did not come into use would be applied to other weights than it
// was made for.

const PATH = '/update_weights_from_tensor'
const LOADER = 'verl.workers.rollout.sglang_rollout.delta_loader.apply_delta'
const NORM = 'model.norm.weight'

/** New float32 bits of elements, by tensor and position. */
type Changes = Record<string, ReadonlyArray<readonly [position: number, value: number]>>

/** A model that a trainer changes by deltas, and what its weights should be. */
class Trainer {
  readonly #t: Test
  readonly #server: Server
  readonly values = new Map<string, Float32Array>()

  constructor (t: Test, server: Server) {
    this.#t = t
    this.#server = server
  }

  async read (...names: string[]): Promise<void> {
    for (const name of names) this.values.set(name, (await this.#server.engine.readWeight(name)).values)
  }

  async delta (changes: Changes, fields: object = {}): Promise<Reply> {
    return await this.#send('indices', changes, fields)
  }

  /** The whole tensors, with these changes. */
  async whole (changes: Changes, fields: object = {}, spec: object = {}): Promise<Reply> {
    const all = Object.entries(changes).map(([name, list]) => {
      const values = Float32Array.from(this.values.get(name)!)
      for (const [position, value] of list) values[position] = value
      return [name, [...values].map((value, position) => [position, value] as const)] as const
    })
    return await this.#send('dense', Object.fromEntries(all), fields, spec)
  }

  /** Records that changes are part of the weights, and compares. */
  async holds (...steps: Changes[]): Promise<void> {
    for (const changes of steps) {
      for (const [name, list] of Object.entries(changes)) {
        for (const [position, value] of list) this.values.get(name)![position] = value
      }
    }
    for (const [name, values] of this.values) {
      this.#t.same((await this.#server.engine.readWeight(name)).values, values, name)
    }
  }

  async #send (encoding: 'indices' | 'dense', changes: Changes, fields: object, more: object = {}): Promise<Reply> {
    const { engine, post } = this.#server
    const positions: number[] = []
    const values: number[] = []
    const params = []
    for (const [name, list] of Object.entries(changes)) {
      const before = [positions.length * 4, values.length]
      for (const [position, value] of list) {
        if (encoding === 'indices') positions.push(position)
        values.push(value)
      }
      params.push({
        name,
        dtype: 'float32',
        shape: (await engine.readWeight(name)).shape,
        pos_start: before[0],
        pos_end: positions.length * 4,
        pos_width: 4,
        val_start: before[1],
        val_end: values.length
      })
    }
    const [at, held] = [Buffer.from(Int32Array.from(positions).buffer), Buffer.from(Float32Array.from(values).buffer)]
    const { hash } = engine.deltaHost
    const checksum = (await hash(at, null)) ^ ((await hash(held, 'float32')) << 1n)
    const spec = Buffer.from(
      JSON.stringify({ encoding, params, ...more, checksum: 'C' }).replace('"C"', String(checksum))
    )
    const blobs = [['__delta_spec__', spec, 'uint8'], ['__positions__', at, 'uint8'], ['__values__', held, 'float32']]
    return await post(PATH, {
      load_format: LOADER,
      serialized_named_tensors: [
        tensorEntry(
          (blobs as Array<[string, Buffer, 'uint8' | 'float32']>)
            .filter(([, blob]) => blob.length > 0)
            .map(([name, blob, dtype]) => ({
              name,
              memory: sharedMemory(this.#t, blob, 2),
              shape: [dtype === 'uint8' ? blob.length : blob.length / 4],
              dtype
            }))
        )
      ],
      ...fields
    })
  }
}

async function start (t: Test, shadowWeights: boolean): Promise<{ server: Server, trainer: Trainer, other: string }> {
  const server = await serve(t, { shadowWeights })
  const trainer = new Trainer(t, server)
  const other = server.names.find(name => /layers\.0.*norm/.test(name))!
  await trainer.read(NORM, other)
  return { server, trainer, other }
}

const LOST = {
  status: 409,
  body: { error: { code: 'CONFLICT', message: /"model.norm.weight".*did not come into use/ } }
}

for (const shadowWeights of [true, false]) {
  t.test(`${shadowWeights ? 'two sets' : 'one set'}: a refused delta is repeated before later ones`, async t => {
    const { server, trainer, other } = await start(t, shadowWeights)
    for (const round of [1, 2]) {
      const first: Changes = { [NORM]: [[0, round + 0.25], [3, -round]] }
      const second: Changes = { [NORM]: [[1, round + 0.5]], [other]: [[2, round]] }
      const third: Changes = { [NORM]: [[3, round * 8]] }
      const { id } = await server.ok('/weight_transactions', { owner: 'another' })
      t.match(await trainer.delta(first), { status: 409, body: { error: { code: 'TRANSACTION_OPEN' } } })
      await server.ok(`/weight_transactions/${String(id)}/abort`)
      await trainer.holds()
      for (const one of [second, third, second]) t.match(await trainer.delta(one), LOST)
      await trainer.holds()
      t.match(await trainer.delta(first), { status: 200 })
      await trainer.holds(first)
      t.match(await trainer.delta({ [NORM]: [[5, round]] }), LOST, 'the second is still missing')
      t.match(await trainer.delta({ [other]: [[5, round]] }), { status: 409, body: { message: /layers.0/ } })
      for (const one of [second, third]) t.match(await trainer.delta(one), { status: 200 })
      await trainer.holds(second, third)
      t.match(await trainer.delta({ [NORM]: [[7, round]] }), LOST, 'as is the one that was refused meanwhile')
      // Tensors that are sent whole need nothing of before.
      const whole: Changes = { [NORM]: [[9, round]], [other]: [[9, round]] }
      t.match(await trainer.whole(whole), { status: 200 })
      await trainer.holds(whole)
      const last: Changes = { [NORM]: [[0, -round]], [other]: [[0, -round]] }
      t.match(await trainer.delta(last), { status: 200 })
      await trainer.holds(last)
    }
  })
}

t.test('a delta in a transaction is a base inside it, and is lost if the transaction is aborted', async t => {
  const { server, trainer } = await start(t, true)
  for (const isCommitted of [false, true, false, true]) {
    const [first, second, third] = [1, 2, 3].map((n): Changes => ({ [NORM]: [[n, n + Number(isCommitted) / 2]] }))
    const { id } = await server.ok('/weight_transactions', { owner: 'trainer' })
    for (const one of [first!, second!]) t.match(await trainer.delta(one, { transaction: id }), { status: 200 })
    await server.ok(`/weight_transactions/${String(id)}/${isCommitted ? 'commit' : 'abort'}`)
    await trainer.holds(...isCommitted ? [first!, second!] : [])
    if (!isCommitted) {
      t.match(await trainer.delta(third!), LOST)
      t.match(await trainer.delta(second!), LOST, 'the first of them comes first')
      for (const one of [first!, second!]) t.match(await trainer.delta(one), { status: 200 })
    }
    t.match(await trainer.delta(third!), { status: 200 })
    await trainer.holds(first!, second!, third!)
  }
})

t.test('a write that fails in the second set loses a delta; a wrong delta does not count', async t => {
  const { server, trainer } = await start(t, true)
  const first: Changes = { [NORM]: [[0, 0.25], [3, -1]] }
  const second: Changes = { [NORM]: [[0, 0.5]] }
  for (const wrong of [{ [NORM]: [[10_000_000, 1]] }, { [NORM]: [[1, 1], [1, 2]] }] as Changes[]) {
    t.match(await trainer.delta(wrong), { status: 400, body: { error: { code: 'TENSOR_PAYLOAD' } } })
  }
  const kept = await trainer.delta({ [NORM]: [[1, 1]] }, { keep: { name: 'delta', generation: 1 } })
  t.match(kept, { status: 400, body: { message: /cannot be kept/ } })
  for (const round of [1, 2]) {
    native().armFault!({ point: 'copy', at: 1, action: 'fail' })
    const failed = await trainer.delta(first)
    t.notOk(native().faultPending!())
    t.ok(failed.status >= 400, JSON.stringify(failed.body))
    t.equal(server.engine.weights.state, 'current')
    if (round === 1) await trainer.holds()
    t.match(await trainer.delta(second), LOST)
    // Weights from a checkpoint are a base as any whole write is.
    if (round === 2) {
      await server.ok('/update_weights_from_disk', { model_path: join(server.folder, 'trained') })
      await trainer.read(...trainer.values.keys())
    } else {
      t.match(await trainer.delta(first), { status: 200 })
      await trainer.holds(first)
    }
    t.match(await trainer.delta(second), { status: 200 })
    await trainer.holds(second)
  }
})

for (const shadowWeights of [true, false]) {
  t.test(`${shadowWeights ? 'two sets' : 'one set'}: a verification that finds differences repairs them`, async t => {
    const { server, trainer, other } = await start(t, shadowWeights)
    const drift: Changes = { [NORM]: [[2, 5]], [other]: [[1, 5]] }
    for (const round of [1, 2]) {
      t.match(await trainer.delta(drift), { status: 200 })
      const version = server.engine.weightVersion
      const flushes = [[other, false], [NORM, true]] as const
      const replies = []
      for (const [name, isLast] of flushes) {
        const fields = { weight_version: `sweep-${round}` }
        replies.push(await trainer.whole({ [name]: [] }, isLast ? fields : {}, { verify: true, is_last: isLast }))
      }
      t.match(replies, [{ status: 200 }, {
        status: 400,
        body: { message: /verification failed: 2 elements.*They are the trainer's now/ }
      }])
      t.equal(server.engine.weightVersion, version, 'the label does not move')
      await trainer.holds()
      t.match(await trainer.whole({ [NORM]: [] }, {}, { verify: true, is_last: true }), { status: 200 })
    }
  })
}
