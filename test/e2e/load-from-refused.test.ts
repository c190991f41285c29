import t from 'tap'
import { readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { eventually, failureOf } from '../helpers/eventually.ts'
import { bareFolder, joinByHand, member, modelFolder, serve, SMALL } from '../helpers/load-from.ts'

// Reasons that prevent loading one engine from another, and the refusals of the peer's routes.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')

const INIT = '/init_weights_send_group_for_remote_instance'
const SEND = '/send_weights_to_remote_instance'
const GROUP = {
  master_address: '127.0.0.1',
  ports: '29999',
  group_rank: 0,
  world_size: 2,
  group_name: 'g',
  backend: 'gloo',
  timeout: 5
}

t.test('another model, another dtype and a wrong key are refused before anything is sent', async t => {
  const peer = await serve(t, 'adder', {}, { adminApiKey: 'right' })
  const folder = bareFolder(t, 'adder')
  const load = async (key: string | undefined, options: object = {}): Promise<unknown> =>
    await createEngine(folder, {
      ...SMALL,
      ...options,
      loadFrom: { url: peer.url, ...key === undefined ? {} : { key } }
    })
  await t.rejects(load(undefined), { code: 'CONFIG', message: /refuses: .*--load-from-key/ })
  await t.rejects(load('wrong'), { code: 'CONFIG', message: /refuses: Unauthorized; --load-from-key/ })
  await t.rejects(load('right', { dtype: 'float32' }), {
    code: 'WEIGHTS_MISMATCH',
    message: /in bfloat16, this engine in float32.*use --dtype bfloat16/
  })
  const config = JSON.parse(readFileSync(join(folder, 'config.json'), 'utf8'))
  writeFileSync(
    join(folder, 'config.json'),
    JSON.stringify({ ...config, rope_parameters: { ...config.rope_parameters, rope_theta: 10001 } })
  )
  await t.rejects(load('right'), { code: 'WEIGHTS_MISMATCH', message: /another model: rope is/ })
  writeFileSync(
    join(folder, 'config.json'),
    JSON.stringify({ ...config, num_hidden_layers: 3, layer_types: config.layer_types.slice(1) })
  )
  await t.rejects(load('right'), {
    code: 'WEIGHTS_MISMATCH',
    message: /another model: num_hidden_layers is 4 there and 3 here/
  })
  t.equal((await peer.get('/health')).body.status, 'ok')
})

t.test('an engine waits for a peer that is not ready, and the deadline names the reason', async t => {
  const peer = await serve(t, 'adder', { weightVersion: 'v1' })
  const folder = bareFolder(t, 'adder')
  await peer.post('/release_memory_occupation', { tags: ['weights'] })
  const late = await eventually(
    async () => await failureOf(createEngine(folder, { ...SMALL, loadFrom: { url: peer.url, timeoutMs: 300 } })),
    error => /memory of its weights/.test(error!.message)
  )
  t.match(late, {
    code: 'DEADLINE',
    message: /was not ready to send its weights: the memory of its weights is released/
  })
  await peer.post('/resume_memory_occupation', { tags: ['weights'] })
  const lines: string[] = []
  const loading = createEngine(folder, {
    ...SMALL,
    loadFrom: {
      url: peer.url,
      log: line => {
        lines.push(line)
      }
    }
  })
  while (lines.length === 0) await new Promise(resolve => setTimeout(resolve, 5))
  t.match(lines[0], /waiting for .* its weights are torn/)
  t.match(await peer.post('/update_weights_from_disk', { model_path: modelFolder('adder'), weight_version: 'v2' }), {
    status: 200
  })
  const engine = await loading
  t.equal(engine.weightVersion, 'v2')
  await engine.close()
})

t.test('while a transaction is open nothing is sent, and the new engine waits for its end', async t => {
  const peer = await serve(t, 'adder', { weightVersion: 'v1' })
  const { body: { id } } = await peer.post('/weight_transactions', { owner: 'trainer', deadline: 60 })
  const lines: string[] = []
  const loading = createEngine(bareFolder(t, 'adder'), {
    ...SMALL,
    loadFrom: {
      url: peer.url,
      log: line => {
        lines.push(line)
      }
    }
  })
  while (lines.length === 0) await new Promise(resolve => setTimeout(resolve, 5))
  t.match(lines[0], /waiting for .* a weight transaction is open/)
  const into = await createEngine(modelFolder('adder-base'), SMALL)
  t.teardown(async () => {
    await into.close()
  })
  const hand = await joinByHand(peer, into)
  t.match(await hand.send(), { status: 409, body: { error: { code: 'TRANSACTION_OPEN' } } })
  await hand.close()
  t.match(await peer.post(`/weight_transactions/${id}/abort`, {}), { status: 200 })
  const engine = await loading
  t.equal(engine.weightVersion, 'v1')
  await engine.close()
})

t.test("invalid bodies are refused with the field, in SGLang's text", async t => {
  const peer = await serve(t, 'adder', { tp: 2 })
  const refused = async (more: object, expected: object): Promise<void> => {
    const reply = await peer.post(INIT, { ...GROUP, ports: '29998,29999', ...more })
    t.match(
      reply,
      { status: 400, body: { success: false, message: /^Failed to init group: /, ...expected } },
      JSON.stringify(more)
    )
  }
  await refused({ group_rank: 1 }, { message: /group_rank: the engine that sends is rank 0/ })
  await refused({ ports: '29999' }, { message: /Expected 2 ports, but got 1 ports/ })
  await refused({ layout: 'checkpoint' }, { message: /Expected 1 ports, but got 2 ports/ })
  await refused({ ports: '29999,29999' }, { message: /each group has a store of its own/ })
  await refused({ ports: '29999,70000' }, { message: /1 to 65535, got 70000/ })
  await refused({ backend: 'nccl' }, {
    message: /this engine computes on the CPU; use "gloo"/,
    error: { code: 'UNSUPPORTED' }
  })
  t.match(await peer.post(INIT, { ...GROUP, ports: 'x' }), { status: 400 })
  t.match(await peer.post(INIT, { ...GROUP, world_size: 1 }), { status: 400 })
  t.match(await peer.post(SEND, GROUP), {
    status: 404,
    body: { message: /Failed to send weights: there is no group "g"/ }
  })
})

t.test("a master address follows the same rules as a trainer's, whichever side runs the store", async t => {
  const peer = await serve(t, 'adder')
  for (const receiverHosts of [true, false]) {
    for (const address of ['169.254.169.254', '8.8.8.8']) {
      t.match(await peer.post(INIT, { ...GROUP, master_address: address, receiver_hosts: receiverHosts }), {
        status: 403,
        body: { error: { code: 'MASTER_REFUSED' } }
      })
    }
  }
})

t.test('a receiver that never connects gives an error within the deadline, and its group is closed', async t => {
  const peer = await serve(t, 'adder')
  t.match(await peer.post(INIT, { ...GROUP, receiver_hosts: true, ports: '1', timeout: 0.3 }), {
    status: 504,
    body: { message: /^Failed to init group: / }
  })
  // SGLang's form: this engine runs the store, and no other rank joins.
  for (let round = 0; round < 2; round++) {
    t.match(await peer.post(INIT, { ...GROUP, ports: '29871', timeout: 0.3 }), {
      status: 504,
      body: { message: /^Failed to init group: / }
    }, 'the port is free again')
  }
  const other = await member(t, await createEngine(bareFolder(t, 'adder'), { ...SMALL, loadFrom: { url: peer.url } }))
  t.same(await other.sums(), await peer.sums())
})
