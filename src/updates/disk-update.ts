import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../errors.ts'
import type { WriteReport } from '../contract/weight-source.ts'
import { applySource, labelText, measured, openedFor, prefixed, tornCount } from './apply-source.ts'
import type { RouteContext } from '../http/context.ts'
import { nullable, transactionField, unused } from '../http/schemas.ts'

export const DiskUpdateBody = Type.Object({
  model_path: Type.String({
    minLength: 1,
    description: 'A folder, a .safetensors file or an index, inside the allowed roots.'
  }),
  load_format: nullable(Type.String(), 'null, "auto" or "safetensors".'),
  weight_version: nullable(Type.String(), 'The label of the new weights.'),
  flush_cache: Type.Optional(Type.Boolean({ description: 'Drop the prefix cache (default true).' })),
  abort_all_requests: Type.Optional(Type.Boolean({ description: 'End running requests instead of waiting for them.' })),
  transaction: transactionField,
  is_async: unused(),
  keep_pause: unused(),
  token_step: unused(),
  manifest: unused(),
  torch_empty_cache: unused(),
  recapture_cuda_graph: unused()
}, { title: 'DiskUpdateRequest' })

export type DiskUpdateBody = Static<typeof DiskUpdateBody>

const FORMATS = [null, undefined, 'auto', 'safetensors']

/** Opens, checks and writes a checkpoint, then moves the label. A part of one heals what it brings. The messages are SGLang's. */
export async function updateFromDisk (
  context: RouteContext,
  body: DiskUpdateBody
): Promise<{ message: string, report: WriteReport, torn: number }> {
  return await measured(context.metrics, async () => {
    const { engine } = context
    const source = await openedFor(engine, body, async () => {
      demandFormat(body)
      return await context.openCheckpoint(body.model_path).catch((error: unknown) => {
        throw prefixed('Failed to get weights iterator: ', error)
      })
    })
    const report = await applySource(engine, source, body, {
      allowTorn: true,
      check: report => {
        demandWeights(body.model_path, report)
      }
    })
    context.loaded.update(body.model_path, body.load_format ?? null, report.transaction)
    return {
      message: `Succeeded to update model weights.${labelText(body.weight_version, report)}`,
      report,
      torn: tornCount(engine)
    }
  })
}

function demandFormat ({ load_format: format }: DiskUpdateBody): void {
  if (!FORMATS.includes(format)) {
    throw new RefitError(
      'UNSUPPORTED',
      `load_format: expected "auto" or "safetensors", got ${JSON.stringify(format)}`,
      { param: 'load_format' }
    )
  }
}

function demandWeights (path: string, report: WriteReport): void {
  if (report.tensors > 0) return
  throw new RefitError(
    'WEIGHTS_INCOMPLETE',
    `"${path}" brings no weight of this model (${report.ignored.length} tensors that it has no use for)`,
    { param: 'model_path' }
  )
}
