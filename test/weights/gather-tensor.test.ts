import t from 'tap'
import { missingNames } from '../../src/weights/plan.ts'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { fromBf16, fromF16, toBf16, toF16 } from '../helpers/dtype-values.ts'
import { codedTensor, memorySource } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'

const addon = faultyAddon()

const DECODE = { bfloat16: fromBf16, float16: fromF16 }
/** The value that a store of a dtype keeps. */
const KEPT = {
  bfloat16: (value: number) => fromBf16(toBf16(value)),
  float16: (value: number) => fromF16(toF16(value)),
  float32: (value: number) => value
}

for (const held of ['bfloat16', 'float16', 'float32'] as const) {
  for (const sent of ['bfloat16', 'float16'] as const) {
    t.test(`tensors of ${sent} are read back from a store of ${held} on two ranks`, async (t) => {
      const { store, table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2, held)
      t.teardown(close)
      const names = missingNames(table, new Set())
      const update = await store.update()
      await update.write(memorySource(table, names, 1, tensor => ({ ...tensor, dtype: sent })))
      await update.commit({})
      for (const name of names) {
        const { values } = await store.readTensor(name)
        const expected = Float32Array.from(
          codedTensor(1, name, values.length),
          bits => KEPT[held](DECODE[sent](bits))
        )
        t.ok(Buffer.from(values.buffer).equals(Buffer.from(expected.buffer)), name)
      }
    })
  }
}
