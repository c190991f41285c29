import { Type } from 'typebox'
import { RefitError } from '../errors.ts'
import { invalid } from './refuse.ts'

// LoRA adapters are not applied. All refusals of adapters are made here.

const MAX_NAME = 128
const MERGE =
  'Merge it into the weights (merge_and_unload) and send those by any of the /update_weights_from_... routes'

/** SGLang's reply to the adapter routes. */
export const AdapterRefusal = Type.Object({
  rid: Type.Optional(Type.Null()),
  http_worker_ipc: Type.Optional(Type.Null()),
  success: Type.Optional(Type.Literal(false)),
  error_message: Type.Optional(Type.String()),
  loaded_adapters: Type.Optional(Type.Null()),
  error: Type.Union([
    Type.Object({ message: Type.String(), code: Type.String({ description: 'A stable code, such as UNSUPPORTED.' }) }),
    Type.String({ description: '"Unauthorized" or "Forbidden".' })
  ])
}, { title: 'AdapterRefusal', description: 'Refused; nothing has changed.' })

/** The pickles in a body that loads an adapter: older SGLang versions send one string, newer ones one for each rank. */
export function adapterEntries (body: unknown): string[] {
  if (typeof body !== 'object' || body === null) return []
  const { serialized_tensors: one, serialized_named_tensors: many } = body as Record<string, unknown>
  return [one, many].flat().filter(entry => typeof entry === 'string')
}

/**
 * The refusal of a body that loads or unloads an adapter. `advice`: what its sender can do instead. `note`: what
 * became of its bytes.
 */
export function adapterRefusal (
  body: unknown,
  { advice = MERGE, note }: { advice?: string, note?: string } = {}
): RefitError {
  const name = (body as { lora_name?: unknown } | null | undefined)?.lora_name
  const which = typeof name === 'string' ? ` ${JSON.stringify(name.slice(0, MAX_NAME))}` : ''
  const end = note === undefined ? '' : `. ${note}`
  return new RefitError('UNSUPPORTED', `LoRA adapter${which}: this server does not apply adapters. ${advice}${end}`, {
    param: 'lora_name'
  })
}

/**
 * SGLang chooses an adapter by the model name "model:adapter". Serving the bare model instead would silently be another
 * policy.
 */
export function refuseAdapterName (model: string | null | undefined, served: string): void {
  if (model == null || model === served || !model.startsWith(`${served}:`)) return
  throw invalid('model', `LoRA adapters are not supported by this server; the model is ${JSON.stringify(served)}`)
}
