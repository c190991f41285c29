import { Type } from 'typebox'
import type { Static } from 'typebox'
import { GROUP_NAME } from '../../updates/distributed-update.ts'
import type { DistributedUpdate } from '../../updates/distributed-update.ts'
import { nullable, unused } from '../schemas.ts'
import { toUpdateFields, updateFields } from './update-fields.ts'

export const DistributedUpdateBody = Type.Object({
  names: Type.Array(Type.String(), { description: 'Names in checkpoints, in the order in which they are broadcast.' }),
  dtypes: Type.Array(Type.String(), { description: '"bfloat16", or as torch prints it, "torch.bfloat16".' }),
  shapes: Type.Array(Type.Array(Type.Integer({ minimum: 0 }))),
  group_name: Type.Optional(Type.String({ description: `Default "${GROUP_NAME}".` })),
  load_format: nullable(
    Type.String(),
    '"flattened_bucket": one broadcast of bytes, all tensors one after another. ' +
      'Anything else: one broadcast for each tensor.'
  ),
  ...updateFields,
  selector: unused(),
  torch_empty_cache: unused()
}, { title: 'DistributedUpdateRequest' })

export type DistributedUpdateBody = Static<typeof DistributedUpdateBody>

export function toDistributedUpdate (body: DistributedUpdateBody): DistributedUpdate {
  const { names, dtypes, shapes, group_name: groupName, load_format: loadFormat } = body
  return { ...toUpdateFields(body), names, dtypes, shapes, groupName, loadFormat }
}
