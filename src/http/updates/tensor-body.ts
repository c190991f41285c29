import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { TensorUpdate } from '../../updates/tensor-update.ts'
import { nullable, unused } from '../schemas.ts'
import { toUpdateFields, updateFields } from './update-fields.ts'

export const KeptName = Type.Object({
  name: Type.String({ minLength: 1, maxLength: 200 }),
  generation: Type.Integer({
    minimum: 0,
    maximum: Number.MAX_SAFE_INTEGER,
    description: "The sender's number of the kept memory; it changes when the memory does."
  })
}, { additionalProperties: false, title: 'KeptTensors' })

export const TensorUpdateBody = Type.Object({
  serialized_named_tensors: Type.Optional(Type.Array(Type.String(), {
    description: 'Base64 of pickled handles, one text per tensor-parallel rank or one for all: torch tensors through ' +
      "ForkingPickler (SGLang's MultiprocessingSerializer). They are read as data; nothing is unpickled. " +
      'Required unless `kept` is given.'
  })),
  load_format: nullable(
    Type.String(),
    'null: a list of (name, tensor), whole tensors by their names in checkpoints. ' +
      '"flattened_bucket": such tensors in one flat tensor. ' +
      '"direct": a list of each rank\'s own parameters, as SGLang names and shapes them. ' +
      'Other names: custom loaders that were registered when the server started.'
  ),
  ...updateFields,
  keep: nullable(
    KeptName,
    'Keep the tensors that this request opens, to write them again with `kept`. ' +
      'Tensors that are already kept under this name are given back first.'
  ),
  kept: nullable(
    KeptName,
    'Instead of `serialized_named_tensors`: write the tensors that are kept under this name again. ' +
      'The sender must have synchronised its device before it sends this.'
  ),
  disable_draft_model: unused(),
  selector: unused(),
  torch_empty_cache: unused()
}, { title: 'TensorUpdateRequest' })

export type TensorUpdateBody = Static<typeof TensorUpdateBody>

export function toTensorUpdate (body: TensorUpdateBody): TensorUpdate {
  const { serialized_named_tensors: entries, load_format: loadFormat, keep, kept } = body
  return { ...toUpdateFields(body), entries, loadFormat, keep, kept }
}

/** The entries of an invalid body, so that their references can be given back. */
export function entriesOf (body: Readonly<Record<string, unknown>>): string[] {
  const { serialized_named_tensors: entries } = body
  return (Array.isArray(entries) ? entries : [entries]).filter(entry => typeof entry === 'string')
}
