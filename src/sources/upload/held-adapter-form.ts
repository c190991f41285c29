import { randomUUID } from 'node:crypto'
import type { HeldAdapter } from '../../contract/adapters.ts'
import { bytesOf } from '../../native/dtypes.ts'
import { adapterForm } from '../../wire/adapter-form.ts'
import type { AdapterForm } from '../../wire/adapter-form.ts'
import { SAFETENSORS_NAMES } from '../../wire/safetensors/dtypes.ts'
import { encodeHeader } from '../../wire/safetensors/encode.ts'

/** A loaded adapter as the form that uploads it. It is read while it is sent. */
export function heldAdapterForm ({ config, tensors, bytes }: HeldAdapter): AdapterForm {
  const header = encodeHeader(
    tensors.map(({ name, dtype, shape }) => ({ name, dtype: SAFETENSORS_NAMES[dtype], shape }))
  )
  const length = tensors.reduce(
    (sum, { dtype, shape }) => sum + shape.reduce((product, dim) => product * dim, bytesOf(dtype)),
    header.length
  )
  return adapterForm(config, { length, chunks: chunks() }, randomUUID())

  async function* chunks (): AsyncGenerator<Uint8Array, void, undefined> {
    yield header
    yield* bytes()
  }
}
