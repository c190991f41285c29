import { createHash } from 'node:crypto'
import { readSync } from 'node:fs'
import { RefitError } from '../../../src/errors.ts'
import type {
  AdapterInfo,
  AdapterLimits,
  AdapterReport,
  Adapters,
  LoadAdapterOptions,
  UnloadMode
} from '../../../src/contract/adapters.ts'
import type { WeightSource } from '../../../src/contract/weight-source.ts'

/**
 * Adapters of the fake engine: they keep the contract on names, versions and modes, and compute nothing. The digest is
 * a hash of the bytes that they read from the source.
 */
export class FakeAdapters implements Adapters {
  limits: AdapterLimits = { slots: 4, maxRank: 64, maxLoaded: 16, targets: ['q_proj', 'v_proj'] }
  /** The loads, in order. */
  readonly loads: { name: string, config: any, names: string[], options: LoadAdapterOptions | undefined }[] = []
  readonly unloads: string[] = []
  /** Set to refuse the next loads. */
  fault: RefitError | null = null
  /** Modules that every load lacks. */
  missing: string[] = []
  /** Set to hold loads. */
  hold: Promise<void> | null = null
  isZero = false
  readonly #infos = new Map<string, AdapterInfo>()
  #version = 0

  list (): AdapterInfo[] {
    return [...this.#infos.values()]
  }

  get (name: string): AdapterInfo | undefined {
    return this.#infos.get(name)
  }

  async load (
    name: string,
    config: unknown,
    source: WeightSource,
    options?: LoadAdapterOptions
  ): Promise<AdapterReport> {
    const names = source.tensors.map(tensor => tensor.name)
    this.loads.push({ name, config, names, options })
    await this.hold
    if (this.fault !== null) throw this.fault
    const old = this.#infos.get(name)
    if (old !== undefined && options?.existing === 'refuse') {
      throw new RefitError('CONFLICT', `an adapter named "${name}" is loaded already`)
    }
    const info: AdapterInfo = {
      name,
      version: ++this.#version,
      path: options?.path ?? '',
      rank: (config as { r?: number }).r ?? 8,
      modules: ['q_proj'],
      digest: digestOf(source),
      pinned: options?.pinned ?? false,
      resident: true,
      requests: 0
    }
    this.#infos.set(name, info)
    return {
      ...info,
      tensors: names.length,
      bytes: 64,
      missing: this.missing,
      missingCount: this.missing.length,
      isZero: this.isZero,
      ...old === undefined ? {} : { replaced: old.version },
      ms: { plan: 1, wait: 2, write: 3, total: 6 }
    }
  }

  async unload (name: string, mode: UnloadMode = 'finish'): Promise<AdapterInfo> {
    this.unloads.push(`${name} ${mode}`)
    const info = this.#infos.get(name)
    if (info === undefined) throw new RefitError('ADAPTER_UNKNOWN', `no LoRA adapter named "${name}" is loaded`)
    this.#infos.delete(name)
    return info
  }
}

function digestOf (source: WeightSource): string {
  const hash = createHash('sha256')
  if (source.kind === 'stored') {
    for (const { source: index, offset } of source.tensors) {
      const from = source.sources[index]!
      const bytes = Buffer.alloc(4)
      if ('fd' in from) readSync(from.fd, bytes, 0, 4, offset)
      else if ('buffer' in from) bytes.set(from.buffer.subarray(offset, offset + 4))
      hash.update(bytes)
    }
  }
  return hash.digest('hex').slice(0, 16)
}
