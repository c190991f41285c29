import t from 'tap'
import { openArealTensors } from '../../src/dialects/areal/tensors.ts'
import { call, routeApp } from '../helpers/route-app.ts'

const base64 = (bytes: ArrayLike<number>): string => Buffer.from(bytes).toString('base64')
const floats = (...values: number[]): string => base64(new Uint8Array(Float32Array.from(values).buffer))

t.test('bfloat16 that is sent as float32 is recognised by its size', async t => {
  const { tensors, sources } = openArealTensors(['b', 'a', 'c'], {
    a: { data: floats(1, 2), shape: [2], dtype: 'torch.bfloat16' },
    b: { data: base64([1, 2, 3, 4]), shape: [1, 2], dtype: 'bfloat16' },
    c: { data: floats(3), shape: [], dtype: 'torch.float32' },
    unnamed: { data: '%', shape: [], dtype: 'x' }
  })
  t.same(tensors, [
    { name: 'b', dtype: 'bfloat16', shape: [1, 2], source: 0, offset: 0 },
    { name: 'a', dtype: 'float32', shape: [2], source: 1, offset: 0 },
    { name: 'c', dtype: 'float32', shape: [], source: 2, offset: 0 }
  ])
  t.same(sources.map(source => (source as { buffer: Uint8Array }).buffer.length), [4, 8, 4])
})

t.test('an invalid tensor is refused with its name', async t => {
  const good = { data: floats(1, 2), shape: [2], dtype: 'torch.float32' }
  const cases: Array<[change: object, message: RegExp]> = [
    [{ data: base64([1, 2, 3]) }, /^tensor "a": its data has 3 bytes; expected 8$/],
    [{ data: floats(1), dtype: 'torch.bfloat16', shape: [3] }, /its data has 4 bytes; expected 6, or 12 as float32$/],
    [{ data: 'AAA' }, /^tensor "a": its data is not base64$/],
    [{ data: null }, /meta device/],
    [{ dtype: 'torch.int64', shape: [1] }, /int64 is not one of weights/],
    [{ dtype: 'torch.nothing' }, /not a dtype of torch/],
    [{ shape: [-1] }, /not negative/]
  ]
  for (const [change, message] of cases) {
    t.throws(() => openArealTensors(['a'], { a: { ...good, ...change } }), { message })
  }
  t.throws(() => openArealTensors(['__proto__'], {}), { code: 'INVALID_REQUEST', param: 'weights' })
})

t.test("AReaL's routes reply in its form, and exist only with its dialect", async t => {
  const { url, engine } = await routeApp(t)
  t.same((await call(`${url}/areal_pause_generation`, {})).json, {
    success: true,
    message: 'Generation paused and all requests aborted'
  })
  t.same((await call(`${url}/areal_continue_generation`, {})).json, { success: true, message: 'Generation continued' })
  const reply = await call(`${url}/areal_update_weights_tensor`, {
    names: ['b.bias'],
    weights: { 'b.bias': { type: 'tensor', data: floats(1, 2, 3, 4), shape: [4], dtype: 'torch.float32' } }
  })
  t.same([reply.status, reply.json.success], [200, true], reply.text)
  t.ok(engine.calls.some(text => text.startsWith('update')))
  for (
    const [path, body, status] of [
      ['/areal_update_weights_xccl', {}, 409],
      ['/areal_set_update_weight_meta', { names: [], dtypes: [], shapes: [], group_name: 'x' }, 404],
      ['/areal_set_update_weight_meta_lora', { lora_name: 'v1' }, 400],
      ['/areal_init_weights_update_group', {
        master_address: '127.0.0.1',
        master_port: '29500',
        rank_offset: 1,
        world_size: 2,
        backend: 'nccl',
        group_name: 'g'
      }, 400]
    ] as const
  ) {
    const refused = await call(url + path, body)
    t.equal(refused.status, status, refused.text)
    t.match(refused.json, { success: false, message: String, error: { message: String, code: String } })
  }
  const other = await routeApp(t, { dialects: ['vllm'] })
  t.equal((await call(`${other.url}/areal_pause_generation`, {})).status, 404)
})
