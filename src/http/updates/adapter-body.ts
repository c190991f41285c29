import { Type } from 'typebox'
import { nullable, unused } from '../schemas.ts'
import { ipcTimeout, zmqHandles } from './ipc-fields.ts'
import { KeptName } from './tensor-body.ts'

// Fields of requests that load LoRA adapters.

export const AdapterName = Type.String({ minLength: 1, description: 'Name of the adapter.' })

export const adapterPath = Type.String({
  minLength: 1,
  description: 'A folder as PEFT saves it (adapter_config.json, adapter_model.safetensors) inside the allowed roots.'
})

export const pinned = nullable(
  Type.Boolean(),
  'Keeps the adapter in its slot, whatever other adapters are used (default false).'
)

export const DiskAdapterBody = Type.Object({
  lora_name: AdapterName,
  lora_path: adapterPath,
  pinned,
  load_inplace: nullable(
    Type.Boolean(),
    'Whether a name that is loaded already gets the new version; otherwise 400 (default: true while the dialect ' +
      'prime-rl is served, as its own server does).'
  ),
  lora_id: unused()
}, { title: 'LoadAdapterRequest' })

const config = Type.Object({}, { additionalProperties: true, description: 'The content of adapter_config.json.' })
const upsert = nullable(
  Type.Boolean(),
  'A name that is loaded already gets the new version; otherwise 400 (default false).'
)
const addedTokens = nullable(
  Type.Object({}, { additionalProperties: true }),
  'Tokens that the adapter adds to the vocabulary: refused unless empty.'
)

export const TensorAdapterBody = Type.Object({
  lora_name: AdapterName,
  config_dict: config,
  serialized_named_tensors: nullable(
    Type.Array(Type.String()),
    'Base64 of pickled handles, one text per tensor-parallel rank or one for all, each with the whole adapter.'
  ),
  serialized_tensors: nullable(Type.String(), 'The same as one text, in older versions.'),
  load_format: nullable(Type.String(), 'null, or "flattened_bucket".'),
  expected_checksums: nullable(
    Type.Record(Type.String(), Type.String()),
    "SHA-256 of every tensor's bytes, as hex digits by name. A difference is refused."
  ),
  keep: nullable(KeptName, 'Keep the tensors that this request opens, to load them again with `kept`.'),
  kept: nullable(
    KeptName,
    'Instead of handles: load the tensors again that are kept under this name. The sender has written new values ' +
      'into the same memory, and has waited for its GPU.'
  ),
  pinned,
  upsert,
  added_tokens_config: addedTokens,
  lora_id: unused()
}, { title: 'LoadAdapterFromTensorsRequest' })

export const GroupAdapterBody = Type.Object({
  lora_name: AdapterName,
  config_dict: config,
  names: Type.Array(Type.String()),
  dtypes: Type.Array(Type.String()),
  shapes: Type.Array(Type.Array(Type.Integer({ minimum: 0 }))),
  group_name: nullable(Type.String(), 'Default "weight_update_group".'),
  load_format: nullable(Type.String(), '"flattened_bucket": one broadcast of all tensors; else one for each.'),
  pinned,
  upsert,
  added_tokens_config: addedTokens,
  expected_checksums: nullable(
    Type.Record(Type.String(), Type.String()),
    "SHA-256 of every tensor's bytes, as hex digits by name. They are compared with what the ranks hold, so tensors " +
      "must be sent in the engine's dtype, or as bfloat16 to an engine of float32. A difference is refused."
  ),
  lora_id: unused()
}, { title: 'LoadAdapterFromDistributedRequest' })

export const IpcAdapterBody = Type.Object({
  lora_name: AdapterName,
  config_dict: config,
  zmq_handles: zmqHandles,
  pinned,
  upsert,
  timeout: ipcTimeout
}, { title: 'LoadAdapterFromIpcRequest' })

export const UnloadAdapterBody = Type.Object({
  lora_name: AdapterName,
  lora_id: unused(),
  lora_int_id: unused('The name decides.')
}, { title: 'UnloadAdapterRequest' })

/** The pickles in a body: older SGLang versions send one string, newer ones one for each rank. */
export function adapterEntries (body: Readonly<Record<string, unknown>>): string[] {
  return [body['serialized_tensors'], body['serialized_named_tensors']].flat().filter(entry =>
    typeof entry === 'string'
  )
}
