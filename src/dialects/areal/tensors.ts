import { RefitError } from '../../errors.ts'
import type { DType } from '../../native/dtypes.ts'
import type { NativeSource } from '../../native/write-job.ts'
import { measureTensors } from '../../sources/measure-tensors.ts'
import type { AnnouncedTensor, StoredSource, Transport } from '../../contract/weight-source.ts'
import { decodeBase64 } from '../../wire/torch/payload.ts'
import { describeUnreadDType, torchWeightDType } from '../../wire/torch/dtypes.ts'

/** A tensor as AReaL writes it into JSON. */
export interface ArealTensor {
  data?: string | null
  shape: number[]
  dtype: string
}

const FLOAT_BYTES = 4
const MEMORY: Transport = { name: 'memory', readError: 'CHECKPOINT_FORMAT' }

/**
 * The tensors of one request as a source. numpy has no bfloat16, so AReaL sends float32 values under the dtype
 * bfloat16; the number of bytes tells the two apart. Throws INVALID_REQUEST and TENSOR_PAYLOAD.
 */
export function openArealTensors (
  names: readonly string[],
  weights: Readonly<Record<string, ArealTensor>>
): StoredSource {
  const absent = names.find(name => !Object.hasOwn(weights, name))
  if (absent !== undefined) {
    throw new RefitError(
      'INVALID_REQUEST',
      `weights: "${absent.slice(0, 200)}" is one of names, but has no entry`,
      { param: 'weights' }
    )
  }
  const given = names.map(name => weights[name]!)
  const tensors: AnnouncedTensor[] = []
  const sources: NativeSource[] = []
  for (
    const [index, { name, dtype, shape, bytes }] of measureTensors(
      names,
      given.map(({ dtype }) => dtype),
      given.map(({ shape }) => shape)
    )
      .entries()
  ) {
    const own = torchWeightDType(dtype)
    if (own === undefined) throw payloadError(name, describeUnreadDType(dtype))
    const { data } = given[index]!
    if (data == null) throw payloadError(name, 'it has no data: it is on the meta device')
    const buffer = decoded(name, data)
    tensors.push({ name, dtype: storedAs(name, own, bytes, buffer.length), shape, source: index, offset: 0 })
    sources.push({ buffer })
  }
  return { kind: 'stored', transport: MEMORY, tensors, sources, verify: async () => {}, close: async () => {} }
}

function storedAs (name: string, dtype: DType, bytes: number, got: number): DType {
  if (got === bytes) return dtype
  const asFloats = dtype === 'bfloat16' ? bytes / 2 * FLOAT_BYTES : bytes
  if (dtype === 'bfloat16' && got === asFloats) return 'float32'
  throw payloadError(
    name,
    `its data has ${got} bytes; expected ${bytes}${dtype === 'bfloat16' ? `, or ${asFloats} as float32` : ''}`
  )
}

function decoded (name: string, text: string): Buffer {
  try {
    return decodeBase64(text)
  } catch {
    throw payloadError(name, 'its data is not base64')
  }
}

function payloadError (name: string, what: string): RefitError {
  return new RefitError('TENSOR_PAYLOAD', `tensor "${name}": ${what}`, { param: name })
}
