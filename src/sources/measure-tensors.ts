import { RefitError } from '../errors.ts'
import { readDTypeText } from '../wire/torch/dtype-text.ts'

export interface MeasuredTensor {
  name: string
  /** The canonical name, as torch prints it without `torch.`. */
  dtype: string
  shape: number[]
  bytes: number
}

/**
 * The number of bytes that a trainer will send for each tensor that it names. Throws INVALID_REQUEST, with the field,
 * if it cannot be computed.
 */
export function measureTensors (
  names: readonly string[],
  dtypes: readonly string[],
  shapes: readonly (readonly number[])[]
): MeasuredTensor[] {
  if (dtypes.length !== names.length || shapes.length !== names.length) {
    throw invalid(
      dtypes.length === names.length ? 'shapes' : 'dtypes',
      `names, dtypes and shapes have ${names.length}, ${dtypes.length} and ${shapes.length} entries; ` +
        'expected the same number'
    )
  }
  let sum = 0
  return names.map((name, index) => {
    const dtype = readDTypeText(dtypes[index]!)
    if (dtype === undefined) {
      throw invalid(
        'dtypes',
        `"${dtypes[index]!.slice(0, 100)}" of "${name}" is not a dtype of torch whose size is known here`
      )
    }
    const shape = [...shapes[index]!]
    let bytes = dtype.bytes
    for (const size of shape) {
      if (!Number.isSafeInteger(size) || size < 0) {
        throw invalid(
          'shapes',
          `[${shape.join(', ')}] of "${name}": expected whole numbers, not negative`
        )
      }
      bytes *= size
    }
    sum += bytes
    if (!Number.isSafeInteger(sum)) throw invalid('shapes', `[${shape.join(', ')}] of "${name}" is too big`)
    return { name, dtype: dtype.name, shape, bytes }
  })
}

function invalid (param: string, message: string): RefitError {
  return new RefitError('INVALID_REQUEST', `${param}: ${message}`, { param })
}
