import { RefitError } from '../../errors.ts'
import { describePickle } from '../pickle/values.ts'
import type { PickleValue } from '../pickle/values.ts'
import { MAX_TENSORS } from '../safetensors/header.ts'
import { clip } from '../strict-json.ts'
import { payloadError } from './tensor.ts'

const MAX_NAME = 2048
const LORA = /(?:^|\.)lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\.|$)/

/** Throws TENSOR_PAYLOAD for a value that is no name. */
export function toTensorName (value: PickleValue | undefined): string {
  if (typeof value !== 'string') throw payloadError(`a tensor's name is ${describePickle(value)}, not a str`)
  if (value === '' || value.length > MAX_NAME || value.includes('\0')) {
    throw payloadError("a tensor's name is empty, too long or holds NUL")
  }
  return value
}

/** The same for tensors of the model: throws UNSUPPORTED for a part of a LoRA adapter. */
export function toWeightName (value: PickleValue | undefined): string {
  const name = toTensorName(value)
  if (!name.includes('lora_') || !LORA.test(name)) return name
  throw new RefitError(
    'UNSUPPORTED',
    `tensor ${JSON.stringify(clip(name))} is a part of a LoRA adapter, and this request updates the model's own ` +
      'weights: send adapters to /load_lora_adapter_from_tensors, _from_distributed, _from_ipc or ' +
      '/load_lora_adapter, or merge the adapter into the weights (merge_and_unload) and send those',
    { param: clip(name) }
  )
}

/** Call it before anything is made for each tensor. Throws TENSOR_PAYLOAD. */
export function checkTensorCount (count: number): void {
  if (count > MAX_TENSORS) throw payloadError(`${count} tensors (at most ${MAX_TENSORS})`)
}

/** The error with the tensor's name in front, unless it has a name already. */
export function nameTensor (error: unknown, name: string): unknown {
  if (!(error instanceof RefitError) || error.param !== undefined) return error
  return new RefitError(error.code, `tensor ${JSON.stringify(clip(name))}: ${error.message}`, { param: clip(name) })
}
