import t from 'tap'
import { modelFolder, serve } from '../helpers/load-from.ts'

// Tensors of a request that was refused are pending in its open scope: the label may not move without them.

const bodies: Record<string, object> = {
  '/update_weights_from_tensor': { serialized_named_tensors: 7 },
  '/update_weights_from_distributed': { names: ['model.norm.weight'], dtypes: ['bfloat16'], shapes: 'x' },
  '/update_weights_from_disk': { model_path: modelFolder('adder'), flush_cache: 'x' },
  '/update_weights_from_disk?': { model_path: modelFolder('adder'), load_format: 'gguf' },
  // No process listens there.
  '/update_weights_from_ipc': { zmq_handles: { 0: 'ipc:///nowhere/nobody' }, timeout: 1 }
}

for (const [path, body] of Object.entries(bodies)) {
  t.test(`a scope in which ${path} was refused has pending tensors and cannot end`, async t => {
    const { engine, post } = await serve(t, 'adder-base', { weightVersion: 'step-1' })
    t.match(await post('/begin_weight_update', {}), { status: 200 })
    const refused = await post(path, body)
    t.not(refused.status, 200)
    const end = await post('/end_weight_update', { weight_version: 'step-2' })
    t.equal(end.status, 409, end.body.message)
    t.equal(engine.weightVersion, 'step-1')
  })
}
