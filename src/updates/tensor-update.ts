import { Type } from 'typebox'
import type { Static } from 'typebox'
import { errorMessage, RefitError } from '../errors.ts'
import type { WeightSource, WriteReport } from '../contract/weight-source.ts'
import { applySource, labelText, measured, openedFor, owe, tornCount } from './apply-source.ts'
import type { RouteContext } from '../http/context.ts'
import { nullable, transactionField, unused } from '../http/schemas.ts'

const KeptName = Type.Object({
  name: Type.String({ minLength: 1, maxLength: 200 }),
  generation: Type.Integer({
    minimum: 0,
    maximum: Number.MAX_SAFE_INTEGER,
    description: "The sender's own number of what it keeps: another one for other memory."
  })
}, { additionalProperties: false, title: 'KeptTensors' })

export const TensorUpdateBody = Type.Object({
  serialized_named_tensors: Type.Optional(Type.Array(Type.String(), {
    description:
      "Base64 of pickled handles, one text per tensor-parallel rank or one for all: torch tensors through ForkingPickler (SGLang's MultiprocessingSerializer). They are read as data; nothing is unpickled. Required, but for `kept`."
  })),
  load_format: nullable(
    Type.String(),
    'null: a list of (name, tensor), whole tensors by their names in checkpoints. "flattened_bucket": such tensors in one flat tensor. "direct": a list of each rank\'s own parameters, as SGLang names and shapes them. Other names: custom loaders that were registered when the server started.'
  ),
  weight_version: nullable(Type.String(), 'The label of the new weights.'),
  flush_cache: Type.Optional(Type.Boolean({ description: 'Drop the prefix cache (default true).' })),
  abort_all_requests: Type.Optional(Type.Boolean({ description: 'End running requests instead of waiting for them.' })),
  transaction: transactionField,
  keep: nullable(
    KeptName,
    'Keep what is opened for this request, to be written again by `kept`. What is kept under the name is given back first.'
  ),
  kept: nullable(
    KeptName,
    'In place of `serialized_named_tensors`: write what is kept under the name once more. The sender must have synchronised its device before it sends this.'
  ),
  disable_draft_model: unused(),
  selector: unused(),
  torch_empty_cache: unused()
}, { title: 'TensorUpdateRequest' })

export type TensorUpdateBody = Static<typeof TensorUpdateBody>

/** Opens what a trainer shares, writes it, gives it back (unless it is to be kept), and only then answers. The messages are SGLang's. */
export async function updateFromTensor (
  context: RouteContext,
  body: TensorUpdateBody
): Promise<{ message: string, report: WriteReport, torn: number }> {
  return await measured(context.metrics, async () => {
    const report = await write(context, body)
    return { message: `Success${labelText(body.weight_version, report)}`, report, torn: tornCount(context.engine) }
  })
}

async function write ({ engine, tensors, kept }: RouteContext, body: TensorUpdateBody): Promise<WriteReport> {
  let isApplied = false
  const apply = async (source: WeightSource): Promise<WriteReport> => {
    isApplied = true
    return await applySource(engine, source, body, { allowTorn: true })
  }
  const { serialized_named_tensors: entries, load_format: loadFormat = null } = body
  if (body.kept != null) {
    if (entries === undefined && body.keep == null) return await kept.write(body.kept, apply)
    await tensors.discard(entries ?? [])
    throw new RefitError('INVALID_REQUEST', 'kept: it stands in place of serialized_named_tensors and keep', {
      param: 'kept'
    })
  }
  if (entries === undefined) {
    throw new RefitError('INVALID_REQUEST', 'serialized_named_tensors: is required', {
      param: 'serialized_named_tensors'
    })
  }
  const began = performance.now()
  const source = await openedFor(engine, body, async () => await tensors.open({ entries, loadFormat }))
  const decode = performance.now() - began
  const report = body.keep == null
    ? await apply(source)
    : await kept.keep(body.keep, source, apply).catch((error: unknown) => {
      // It was not to be kept, and has not been written.
      if (!isApplied) owe(engine, body, errorMessage(error))
      throw error
    })
  return { ...report, ms: { decode, ...report.ms } }
}

/** What makes two calls the same update: handles are made anew for every request, so that equal texts are a client's retry. */
export function tensorIdentity (
  {
    serialized_named_tensors: entries = [],
    load_format: format = null,
    weight_version: version = null,
    flush_cache: flush = true,
    abort_all_requests: abort = false,
    keep = null
  }: TensorUpdateBody
): string[] {
  return [JSON.stringify([format, version, flush, abort, keep]), ...entries]
}

/** The texts of a body that is not what it should be, for what they share to be given back. */
export function entriesOf (body: unknown): string[] {
  const entries = (body as { serialized_named_tensors?: unknown } | null)?.serialized_named_tensors
  return (Array.isArray(entries) ? entries : [entries]).filter(entry => typeof entry === 'string')
}
