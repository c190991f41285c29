import t from 'tap'
import { endOfExchange, readServerMessage } from '../../../src/wire/trainers/checkpoint-engine.ts'
import { assemble, global, PROTO4, str } from '../../helpers/pickles.ts'
import { pickle } from '../../helpers/zmq-sender.ts'

const HALF = 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'

function bucket (name: string, isLast: boolean): Buffer {
  const entry = { name, dtype: global('torch', 'bfloat16'), shape: [8, 64], offset: 16, handle: null }
  return pickle({ bucket_meta: { [name]: entry }, is_last: isLast })
}

t.test('tensors of an adapter are read where they are expected, and refused among weights', async t => {
  t.same(readServerMessage(bucket(HALF, true), true), {
    type: 'bucket',
    pieces: [{ name: HALF, dtype: 'bfloat16', shape: [8, 64], offset: 16 }],
    isLast: true,
    isDirect: false
  })
  t.throws(() => readServerMessage(bucket(HALF, true)), { code: 'UNSUPPORTED', message: /_from_ipc/ })
  t.equal(readServerMessage(bucket('model.norm.weight', false)).type, 'bucket')
})

t.test('the end of an exchange is known whatever its tensors are', async t => {
  t.equal(endOfExchange(bucket(HALF, true)), 'bucket')
  t.equal(endOfExchange(bucket('', true)), 'bucket')
  t.equal(endOfExchange(bucket('model.norm.weight', false)), null)
  t.equal(endOfExchange(assemble(PROTO4, 'N.')), null)
  t.equal(endOfExchange(assemble(PROTO4, global('builtins', 'ValueError'), '(', str('gone'), 't', 'R', '.')), 'stop')
})
