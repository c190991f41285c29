import t from 'tap'
import type { Test } from 'tap'
import { buildModelTable } from '../../src/model/model-table.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import type { EngineOptions } from '../../src/engine/engine-options.ts'
import { checkVariant } from '../helpers/cuda-model.ts'
import { cudaServer, useStandIn } from '../helpers/cuda-tensors.ts'
import type { Reply } from '../helpers/cuda-tensors.ts'
import { codedTensor } from '../helpers/memory-source.ts'
import { NcclTrainer, useLoop } from '../helpers/nccl-trainer.ts'
import { assemble, global, PROTO4, str } from '../helpers/pickles.ts'
import { int, tuple } from '../helpers/shared-tensors.ts'
import { tinyConfig } from '../helpers/tiny-config.ts'

// prime-rl's broadcasts over NCCL, on simulated GPUs (native/test/nccl_loop.cc).

useStandIn()
const loop = useLoop()

interface Named {
  name: string
  shape: readonly number[]
  elements: number
}

async function world (t: Test, engine: EngineOptions) {
  const config = tinyConfig('Qwen3ForCausalLM')
  const server = await cudaServer(t, config, engine, { ncclPath: loop, groupTimeoutMs: 60_000 })
  const trainer = await NcclTrainer.start(t, { size: 2, loop })
  const [reply] = await Promise.all([
    server.post('/init_broadcaster', {
      host: '127.0.0.1',
      port: trainer.store!.address.port,
      rank_offset: 0,
      inference_world_size: 1
    }),
    trainer.join()
  ])
  if (reply.status !== 200) throw new Error(JSON.stringify(reply.body))
  const table = buildModelTable(parseModelConfig(config), 1)
  const tensors = [...table.tensors.values()].filter(({ alternative }) => !alternative).map(({ name, shape }) => (
    { name, shape, elements: shape.reduce((product, size) => product * size, 1) }
  ))
  const half = tensors.length >> 1
  const dicts = [tensors.slice(0, half), tensors.slice(half)]
  /** `shown`: between the header and the tensors of each state dict. */
  const update = async (variant: number, folder: string, shown: () => unknown = () => {}): Promise<Reply> => {
    const send = async (): Promise<void> => {
      await trainer.broadcast(int64(dicts.length))
      for (const dict of dicts) {
        const pickle = metadata(dict)
        await trainer.broadcast(int64(pickle.length))
        await trainer.broadcast(pickle)
        await shown()
        await trainer.broadcast(
          Buffer.concat(dict.map(({ name, elements }) => Buffer.from(codedTensor(variant, name, elements).buffer)))
        )
      }
    }
    const [posted] = await Promise.all([server.post('/update_weights', { weight_dir: folder }), send()])
    return posted
  }
  return { server, table, trainer, update }
}

function int64 (value: number): Uint8Array {
  return new Uint8Array(BigInt64Array.of(BigInt(value)).buffer)
}

/** `{torch.bfloat16: [(name, shape, numel)]}` */
function metadata (dict: readonly Named[]): Uint8Array {
  const items = dict.flatMap(({ name, shape, elements }) => [str(name), tuple([...shape]), int(elements), '\x87'])
  return assemble(PROTO4, '}', global('torch', 'bfloat16'), '](', ...items, 'es.')
}

t.test("prime-rl's state dicts go to the second set while a request runs, and swap once", async t => {
  const { server, table, trainer, update } = await world(t, { shadowWeights: true })
  const { engine } = server
  t.match(await update(1, '/steps/1'), { status: 200, body: { status: 'ok' } })
  await checkVariant(t, server, table, 1)
  let steps = engine.stats.steps
  let between = 0
  const stop = new AbortController()
  const generated = (async () => {
    while (!stop.signal.aborted) {
      const body = { input_ids: [1, 2], sampling_params: { max_new_tokens: 64, ignore_eos: true } }
      t.match(await server.post('/generate', body), { status: 200 })
    }
  })()
  // The header needs no gate: a sender that waits after it stops no step.
  const waiting = server.post('/update_weights', { weight_dir: '/steps/waits' })
  steps = engine.stats.steps
  while (engine.stats.steps < steps + 20) await new Promise(resolve => setTimeout(resolve, 2))
  t.equal(engine.transactions.current?.writing, false)
  await trainer.broadcast(int64(0))
  t.match(await waiting, { status: 400 }, 'no weight of the model')
  for (const variant of [2, 3]) {
    t.match(await update(variant, `/steps/${variant}`, () => between++), { status: 200 })
    await checkVariant(t, server, table, variant)
  }
  t.equal(between, 4)
  stop.abort()
  await generated
  t.match(engine.setMeter?.counts, { updates: { swap: 3, in_place: 0 } })
  const { updates: [last] } = await (await fetch(`${server.url}/updates`)).json() as { updates: [{ ms: object }] }
  t.match(last.ms, { copy: Number, swap: Number }, 'its own transaction reports the phases of its commit')
})

t.test('a trainer that dies between two state dicts changes nothing with two sets, and tears one', async t => {
  for (const shadowWeights of [true, false]) {
    const { server, table, trainer, update } = await world(t, { shadowWeights })
    t.match(await update(1, '/steps/1'), { status: 200 })
    let shown = 0
    const broken = update(2, '/steps/2', async () => {
      if (++shown < 2) return
      // Otherwise it may die before a byte of the first has been written.
      const hasWritten = (): boolean => (server.engine.transactions.current?.written ?? 0) > 0
      while (!hasWritten()) await new Promise(resolve => setTimeout(resolve, 5))
      trainer.end().catch(() => {})
      throw new Error('the trainer dies')
    })
    await t.rejects(broken, { message: 'the trainer dies' })
    while (server.engine.transactions.current !== null) await new Promise(resolve => setTimeout(resolve, 5))
    t.equal(server.engine.weights.state, shadowWeights ? 'current' : 'torn')
    if (shadowWeights) await checkVariant(t, server, table, 1)
  }
})
