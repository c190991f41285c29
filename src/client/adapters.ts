/** A LoRA adapter of a server: the version that its name stands for. */
export interface Adapter {
  name: string
  /** Grows with every load, whatever its name. */
  version: number
  path: string
  rank: number
  modules: string[]
  /** Checksum of its tensors as every rank holds them. */
  digest: string
  pinned: boolean
  /** In a slot; otherwise it waits in host memory. */
  resident: boolean
  /** Requests that use this version or wait for it. */
  requests: number
}

export interface AdapterReport extends Adapter {
  tensors: number
  bytes: number
  /** Modules that the configuration targets and that were not sent, at most 100. */
  missing: string[]
  missing_count: number
  is_zero: boolean
  /** The version that lost the name. */
  replaced?: number
  warnings: string[]
  ms: { plan: number, wait: number, write: number, total: number }
}

interface AdapterFields {
  name: string
  /** Whether a name that is loaded already gets the new version (default), or the load is refused. */
  replace?: boolean
  /** Keeps it in its slot (default false). */
  pinned?: boolean
}

export interface LoadAdapterRequest extends AdapterFields {
  /** A folder as PEFT saves it, inside the server's allowed roots. */
  path: string
}

export interface AdapterFiles extends AdapterFields {
  /** The content of adapter_config.json. */
  config: object
  /** The bytes of adapter_model.safetensors. */
  weights: Uint8Array<ArrayBuffer> | Blob
}
