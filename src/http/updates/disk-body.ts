import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { DiskUpdate } from '../../updates/disk-update.ts'
import { nullable, unused } from '../schemas.ts'
import { allowMissingField, toUpdateFields, updateFields } from './update-fields.ts'

export const DiskUpdateBody = Type.Object({
  model_path: Type.String({
    minLength: 1,
    description: 'A folder, a .safetensors file or an index, inside the allowed roots.'
  }),
  load_format: nullable(Type.String(), 'null, "auto" or "safetensors".'),
  ...updateFields,
  allow_missing: allowMissingField,
  is_async: unused(),
  keep_pause: unused(),
  token_step: unused(),
  manifest: unused(),
  torch_empty_cache: unused(),
  recapture_cuda_graph: unused()
}, { title: 'DiskUpdateRequest' })

export type DiskUpdateBody = Static<typeof DiskUpdateBody>

export function toDiskUpdate (body: DiskUpdateBody): DiskUpdate {
  return { ...toUpdateFields(body), path: body.model_path, loadFormat: body.load_format }
}
