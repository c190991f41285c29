import { torchItemBytes, torchWeightDType, describeUnreadDType } from '../torch/dtypes.ts'
import { countElements } from '../torch/extent.ts'
import { payloadError } from '../torch/tensor.ts'
import { errorMessage } from '../../errors.ts'

// verl's delta_sharded sends three tensors per flush. This one (uint8, JSON) describes the contents of the other two.

export const DELTA_SPEC = '__delta_spec__'
export const DELTA_POSITIONS = '__positions__'
export const DELTA_VALUES = '__values__'

/** One tensor of the model, or a part of its changes: a tensor with many changes comes in several parts. */
export interface DeltaParam {
  name: string
  /** torch's name. */
  dtype: string
  shape: number[]
  /** Bytes of the positions, and elements of the values. */
  positions: readonly [start: number, end: number]
  values: readonly [start: number, end: number]
}

export interface DeltaSpec {
  /** `indices`: positions and values. `dense`: whole tensors. */
  encoding: 'indices' | 'dense'
  params: DeltaParam[]
  /** hash(positions) xor (hash(values) << 1): 65 bits. */
  checksum: bigint
  /** Only with `dense`: the weights must already be equal to these. */
  verify: boolean
  /** True for the last flush of a verification. */
  isLast: boolean
}

/** Bytes of an int32. */
const POSITION_BYTES = 4

/**
 * Reads a spec for blobs of so many bytes of positions and elements of values. The spec must use all of both, in order.
 * Throws TENSOR_PAYLOAD.
 */
export function readDeltaSpec (bytes: Uint8Array, positionBytes: number, valueCount: number): DeltaSpec {
  const root = parse(bytes)
  const { encoding, checksum, verify, is_last: isLast } = root
  if (encoding !== 'indices' && encoding !== 'dense') {
    throw bad(`encoding is ${show(encoding)}, expected "indices" or "dense"`)
  }
  if (typeof checksum !== 'string' || !/^\d{1,20}$/.test(checksum)) throw bad('checksum is no whole number')
  if (!Array.isArray(root['params'])) throw bad('params is no list')
  const params = root['params'].map((param: unknown, index) => readParam(param, index, encoding))
  requireAll(params, positionBytes, valueCount)
  return {
    encoding,
    params,
    checksum: BigInt(checksum),
    verify: encoding === 'dense' && verify === true,
    isLast: isLast === true
  }
}

function parse (bytes: Uint8Array): Record<string, unknown> {
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(bytes)
    // The checksum may have 65 bits, which JSON.parse would round. Inside a string the quotes would be escaped.
    const root: unknown = JSON.parse(text.replace(/"checksum":\s*(\d+)/g, '"checksum":"$1"'))
    if (typeof root !== 'object' || root === null || Array.isArray(root)) throw new Error('it is no object')
    return root as Record<string, unknown>
  } catch (error) {
    throw bad(`it is not JSON of a delta: ${errorMessage(error)}`)
  }
}

function readParam (value: unknown, index: number, encoding: DeltaSpec['encoding']): DeltaParam {
  const {
    name,
    dtype,
    shape,
    pos_start: posStart,
    pos_end: posEnd,
    pos_width: width,
    val_start: valStart,
    val_end: valEnd
  } = (value ?? {}) as Record<string, unknown>
  if (typeof name !== 'string') throw bad(`params[${index}] has no name`)
  if (typeof dtype !== 'string' || torchWeightDType(dtype) === undefined) {
    throw payloadError(describeUnreadDType(String(dtype)), name)
  }
  if (!Array.isArray(shape) || !shape.every(isCount)) {
    throw payloadError('its shape is not a list of whole numbers from 0 up', name)
  }
  if (![posStart, posEnd, valStart, valEnd].every(isCount)) {
    throw payloadError('its positions and values do not say from where to where', name)
  }
  const [from, to, first, last] = [posStart, posEnd, valStart, valEnd] as [number, number, number, number]
  const elements = countElements(shape, name)
  const count = last - first
  if (encoding === 'dense') {
    if (count !== elements || from !== to) throw payloadError(`it has ${count} values for [${shape.join(', ')}]`, name)
  } else {
    if (width !== POSITION_BYTES) {
      throw payloadError(`its positions have ${show(width)} bytes each, expected ${POSITION_BYTES}`, name)
    }
    if (to - from !== count * POSITION_BYTES) {
      throw payloadError(`it has ${to - from} bytes of positions for ${count} values`, name)
    }
  }
  return { name, dtype, shape: [...shape], positions: [from, to], values: [first, last] }
}

/**
 * Parts follow one another without gap or overlap from the first to the last, so a blob that is cut off or used twice
 * is refused before anything changes.
 */
function requireAll (params: readonly DeltaParam[], positionBytes: number, valueCount: number): void {
  let position = 0
  let value = 0
  for (const { name, positions, values } of params) {
    // Whole tensors have no positions.
    const isEmpty = positions[0] === positions[1]
    if ((!isEmpty && positions[0] !== position) || values[0] !== value || values[1] < values[0]) {
      throw payloadError(
        `its positions begin at byte ${positions[0]} and its values at ${
          values[0]
        }, where those of the one before end at ${position} and ${value}`,
        name
      )
    }
    if (!isEmpty) position = positions[1]
    value = values[1]
  }
  if (position !== positionBytes || value !== valueCount) {
    throw bad(
      `it describes ${position} bytes of positions and ${value} values, ` +
        `and there are ${positionBytes} and ${valueCount}`
    )
  }
}

/** The checksum that the spec should have. */
export function deltaChecksum (positions: bigint, values: bigint): bigint {
  return positions ^ (values << 1n)
}

/** Bytes of an element of the values; undefined for a dtype that is not one of weights. */
export function valueBytes (dtype: string): number | undefined {
  return torchWeightDType(dtype) === undefined ? undefined : torchItemBytes(dtype)
}

function isCount (value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0
}

function bad (message: string): ReturnType<typeof payloadError> {
  return payloadError(message, DELTA_SPEC)
}

function show (value: unknown): string {
  return JSON.stringify(value)?.slice(0, 60) ?? 'nothing'
}
