import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../errors.ts'
import type { WriteReport } from '../weights/source.ts'
import type { RouteContext } from './context.ts'
import { nullable, unused } from './schemas.ts'

export const DiskUpdateBody = Type.Object({
  model_path: Type.String({ minLength: 1, description: 'A folder, a .safetensors file or an index, inside the allowed roots.' }),
  load_format: nullable(Type.String(), 'null, "auto" or "safetensors".'),
  weight_version: nullable(Type.String(), 'The label of the new weights.'),
  flush_cache: Type.Optional(Type.Boolean({ description: 'Drop the prefix cache (default true).' })),
  abort_all_requests: Type.Optional(Type.Boolean({ description: 'End running requests instead of waiting for them.' })),
  is_async: unused(),
  keep_pause: unused(),
  token_step: unused(),
  manifest: unused(),
  torch_empty_cache: unused(),
  recapture_cuda_graph: unused()
}, { title: 'DiskUpdateRequest' })

export type DiskUpdateBody = Static<typeof DiskUpdateBody>

const FORMATS = [null, undefined, 'auto', 'safetensors']

/** Opens, checks and writes a checkpoint, then moves the label. The messages are SGLang's. */
export async function updateFromDisk (context: RouteContext, body: DiskUpdateBody): Promise<{ message: string, report: WriteReport }> {
  const { metrics } = context
  try {
    if (!FORMATS.includes(body.load_format)) {
      throw new RefitError('UNSUPPORTED', `load_format: expected "auto" or "safetensors", got ${JSON.stringify(body.load_format)}`, { param: 'load_format' })
    }
    const report = await write(context, body)
    context.loaded = { modelPath: body.model_path, loadFormat: body.load_format ?? context.loaded.loadFormat }
    metrics.observeUpdate(report)
    const label = body.weight_version == null ? '' : ` Weight version updated to ${body.weight_version}.`
    return { message: `Succeeded to update model weights.${label}`, report }
  } catch (error) {
    metrics.observeFailedUpdate(error instanceof RefitError && error.code === 'WEIGHTS_TORN')
    throw error
  }
}

async function write ({ engine, openCheckpoint }: RouteContext, body: DiskUpdateBody): Promise<WriteReport> {
  const source = await openCheckpoint(body.model_path).catch(error => { throw prefixed('Failed to get weights iterator: ', error) })
  try {
    const update = await engine.update({ abortAllRequests: body.abort_all_requests ?? false })
    try {
      const report = await update.write(source)
      if (report.tensors === 0) throw new RefitError('WEIGHTS_INCOMPLETE', `"${body.model_path}" brings no weight of this model (${report.ignored.length} tensors that it has no use for)`, { param: 'model_path' })
      await update.commit({ flushCache: body.flush_cache ?? true, ...body.weight_version == null ? {} : { version: body.weight_version } })
      return report
    } catch (error) {
      await update.abort(error instanceof Error ? error.message : String(error))
      throw prefixed('Failed to update weights: ', error)
    }
  } finally {
    await source.close()
  }
}

function prefixed (prefix: string, error: unknown): unknown {
  if (!(error instanceof RefitError)) return error
  return new RefitError(error.code, prefix + error.message, { cause: error, ...error.param === undefined ? {} : { param: error.param } })
}
