import { Type } from 'typebox'
import { RefitError } from '../../errors.ts'

const MAX_NAME = 128

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

/** The pickles in a body: one text in older SGLangs, one for each rank in newer ones. */
export function adapterEntries (body: unknown): string[] {
  if (typeof body !== 'object' || body === null) return []
  const { serialized_tensors: one, serialized_named_tensors: many } = body as Record<string, unknown>
  return [one, many].flat().filter(entry => typeof entry === 'string')
}

export function refuseAdapter (body: unknown): RefitError {
  const name = (body as { lora_name?: unknown } | null | undefined)?.lora_name
  const which = typeof name === 'string' ? ` ${JSON.stringify(name.slice(0, MAX_NAME))}` : ''
  return new RefitError(
    'UNSUPPORTED',
    `LoRA adapter${which}: this server does not apply adapters. Merge it into the weights (merge_and_unload) and send those by any of the /update_weights_from_... routes`,
    { param: 'lora_name' }
  )
}
