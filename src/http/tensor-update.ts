import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../errors.ts'
import type { WriteReport } from '../weights/source.ts'
import { applySource, labelText, measured } from './apply-source.ts'
import type { RouteContext } from './context.ts'
import { nullable, unused } from './schemas.ts'

export const TensorUpdateBody = Type.Object({
  serialized_named_tensors: Type.Array(Type.String(), {
    description: 'Base64 of pickled handles, one text per tensor-parallel rank or one for all: torch tensors through ForkingPickler (SGLang\'s MultiprocessingSerializer). They are read as data; nothing is unpickled.'
  }),
  load_format: nullable(Type.String(), 'null: a list of (name, tensor), whole tensors by their names in checkpoints. "flattened_bucket": such tensors in one flat tensor. "direct": a list of each rank\'s own parameters, as SGLang names and shapes them.'),
  weight_version: nullable(Type.String(), 'The label of the new weights.'),
  flush_cache: Type.Optional(Type.Boolean({ description: 'Drop the prefix cache (default true).' })),
  abort_all_requests: Type.Optional(Type.Boolean({ description: 'End running requests instead of waiting for them.' })),
  disable_draft_model: unused(),
  selector: unused(),
  torch_empty_cache: unused()
}, { title: 'TensorUpdateRequest' })

export type TensorUpdateBody = Static<typeof TensorUpdateBody>

const FORMATS = [null, 'flattened_bucket', 'direct']

/** Opens what a trainer shares, writes it, gives it back, and only then answers. The messages are SGLang's. */
export async function updateFromTensor (context: RouteContext, body: TensorUpdateBody): Promise<{ message: string, report: WriteReport, torn: number }> {
  return await measured(context.metrics, async () => {
    const { serialized_named_tensors: entries, load_format: loadFormat = null } = body
    if (!FORMATS.includes(loadFormat)) {
      await context.tensors.discard(entries)
      throw new RefitError('UNSUPPORTED', `load_format: expected null, "flattened_bucket" or "direct", got ${JSON.stringify(loadFormat)}`, { param: 'load_format' })
    }
    const source = await context.tensors.open({ entries, loadFormat })
    const report = await applySource(context.engine, source, body, { allowTorn: true })
    const { weights } = context.engine
    return { message: `Success${labelText(body.weight_version)}`, report, torn: weights.state === 'torn' ? weights.tensors.length : 0 }
  })
}

/** What makes two calls the same update: handles are made anew for every request, so that equal texts are a client's retry. */
export function tensorIdentity ({ serialized_named_tensors: entries, load_format: format = null, weight_version: version = null, flush_cache: flush = true, abort_all_requests: abort = false }: TensorUpdateBody): string {
  return `${JSON.stringify([format, version, flush, abort])}\n${entries.join('\n')}`
}

/** The texts of a body that is not what it should be, for what they share to be given back. */
export function entriesOf (body: unknown): string[] {
  const entries = (body as { serialized_named_tensors?: unknown } | null)?.serialized_named_tensors
  return (Array.isArray(entries) ? entries : [entries]).filter(entry => typeof entry === 'string')
}
