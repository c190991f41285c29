import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { WriteReport } from '../contract/weight-source.ts'
import { applySource, labelText, measured, openedFor, prefixed, tornCount } from './apply-source.ts'
import type { RouteContext } from '../http/context.ts'
import { nullable, transactionField, unused } from '../http/schemas.ts'

export const GROUP_NAME = 'weight_update_group'

export const DistributedUpdateBody = Type.Object({
  names: Type.Array(Type.String(), { description: 'Names in checkpoints, in the order in which they are broadcast.' }),
  dtypes: Type.Array(Type.String(), { description: '"bfloat16", or as torch prints it, "torch.bfloat16".' }),
  shapes: Type.Array(Type.Array(Type.Integer({ minimum: 0 }))),
  group_name: Type.Optional(Type.String({ description: `Default "${GROUP_NAME}".` })),
  load_format: nullable(
    Type.String(),
    '"flattened_bucket": one broadcast of bytes, all tensors one after another. Anything else: one broadcast for each tensor.'
  ),
  weight_version: nullable(Type.String(), 'The label of the new weights.'),
  flush_cache: Type.Optional(Type.Boolean({ description: 'Drop the prefix cache (default true).' })),
  abort_all_requests: Type.Optional(Type.Boolean({ description: 'End running requests instead of waiting for them.' })),
  transaction: transactionField,
  selector: unused(),
  torch_empty_cache: unused()
}, { title: 'DistributedUpdateRequest' })

export type DistributedUpdateBody = Static<typeof DistributedUpdateBody>

const FAILED = 'Failed to update parameter online: '

/** Receives what the trainer broadcasts, writes it and only then answers. What is refused is received and dropped before. The messages are SGLang's. */
export async function updateFromDistributed (
  context: RouteContext,
  body: DistributedUpdateBody
): Promise<{ message: string, report: WriteReport, torn: number }> {
  const { engine, distributed, metrics } = context
  return await measured(metrics, async () => {
    const source = await openedFor(
      engine,
      body,
      async () =>
        await distributed.open({
          ...body,
          groupName: body.group_name ?? GROUP_NAME,
          loadFormat: body.load_format ?? null
        })
    )
      .catch((error: unknown) => {
        throw prefixed(FAILED, error)
      })
    const report = await applySource(engine, source, body, { allowTorn: true, failed: '' }).catch((error: unknown) => {
      throw prefixed(FAILED, source.explain(error))
    })
    return {
      message: `Succeeded to update parameter online.${labelText(body.weight_version, report)}`,
      report,
      torn: tornCount(engine)
    }
  })
}

/** What makes two calls the same update, besides the transaction. */
export function distributedIdentity (
  {
    names,
    dtypes,
    shapes,
    group_name: group = GROUP_NAME,
    load_format: format = null,
    weight_version: version = null,
    flush_cache: flush = true,
    abort_all_requests: abort = false
  }: DistributedUpdateBody
): string {
  return JSON.stringify([group, format, version, flush, abort, names, dtypes, shapes])
}
