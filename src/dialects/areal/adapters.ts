import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { AdapterReport } from '../../contract/adapters.ts'
import { RefitError } from '../../errors.ts'
import type { UpdatesContext } from '../../http/context.ts'
import { loadAdapterFromDisk, unloadAdapter, withNote } from '../../updates/adapter-load.ts'
import { AdapterParts } from '../../updates/adapter-parts.ts'
import { GROUP_NAME } from '../../updates/distributed-update.ts'
import { memoize } from '../memoize.ts'

/** AReaL's announcement of an adapter; the request that receives it has the same fields or none. */
export const ArealAdapter = Type.Object({
  names: Type.Array(Type.String()),
  dtypes: Type.Array(Type.String()),
  shapes: Type.Array(Type.Array(Type.Integer({ minimum: 0 }))),
  group_name: Type.String({ minLength: 1 }),
  lora_name: Type.String({ minLength: 1 }),
  lora_int_id: Type.Integer(),
  lora_target_modules: Type.Union([Type.String(), Type.Array(Type.String())]),
  lora_rank: Type.Integer({ minimum: 1 }),
  lora_alpha: Type.Number(),
  lora_bias: Type.Optional(Type.String()),
  base_model_name: Type.Optional(Type.Union([Type.String(), Type.Null()]))
}, { title: 'ArealAdapterMeta' })

export type ArealAdapter = Static<typeof ArealAdapter>

export interface ArealDiskAdapter {
  lora_model_path: string
  lora_name: string
  lora_int_id: number
}

/** The outcome of one of AReaL's requests. */
export interface ArealLoad {
  /** Null: a part has come, and others are still to come. */
  report: AdapterReport | null
  /** Modules that no part had so far. */
  missing: readonly string[]
  /** Name of the version before, which was unloaded. */
  unloaded: string | null
}

/**
 * AReaL gives every version a name of its own and keeps its number (lora_int_id): the new version takes the place of
 * the one with the same number, whose name is refused from then on.
 */
export class ArealAdapters {
  readonly #context: UpdatesContext
  readonly #names = new Map<number, string>()
  readonly #parts: AdapterParts
  #announced: ArealAdapter | null = null

  constructor (context: UpdatesContext) {
    this.#context = context
    this.#parts = new AdapterParts(context)
  }

  /** Replaces an announcement that was not used. Throws NOT_FOUND, or the error that the group failed with. */
  announce (adapter: ArealAdapter): void {
    this.#context.groups.get(adapter.group_name)
    this.#announced = adapter
  }

  /**
   * Receives the announced adapter or part, and loads the adapter when all of it has come: AReaL sends one part for
   * each pipeline stage, and large ones in buckets. Throws CONFLICT if none is announced.
   */
  async receive (): Promise<ArealLoad> {
    const adapter = this.#announced
    if (adapter === null) {
      throw new RefitError(
        'CONFLICT',
        'no adapter is announced since the last one: call /areal_set_update_weight_meta_lora before each ' +
          '/areal_update_weights_lora_xccl. Nothing was received'
      )
    }
    this.#announced = null
    const { lora_name: name, lora_int_id: id } = adapter
    const { report, missing } = await this.#parts.add({
      name,
      config: configOf(adapter),
      names: adapter.names,
      dtypes: adapter.dtypes,
      shapes: adapter.shapes,
      groupName: adapter.group_name
    })
    return { report, missing, unloaded: report === null ? null : await this.#register(id, name) }
  }

  async load ({ lora_model_path: path, lora_name: name, lora_int_id: id }: ArealDiskAdapter): Promise<ArealLoad> {
    const report = await loadAdapterFromDisk(this.#context, { name, path })
    return { report, missing: report.missing, unloaded: await this.#register(id, name) }
  }

  /** The trainer broadcasts even if its request is invalid: the tensors are received and dropped. */
  async refuse (body: Readonly<Record<string, unknown>>, error: Error): Promise<Error> {
    return withNote(error, await this.#context.distributed.refuse(body, GROUP_NAME)) as Error
  }

  /** Returns the name of the version before. */
  async #register (id: number, name: string): Promise<string | null> {
    const old = this.#names.get(id)
    this.#names.set(id, name)
    if (old === undefined || old === name) return null
    // Another client may have unloaded it.
    await unloadAdapter(this.#context, old).catch(() => {})
    return old
  }
}

export const arealAdaptersOf = memoize((context: UpdatesContext) => new ArealAdapters(context))

/** PEFT's configuration. */
function configOf (adapter: ArealAdapter): object {
  return {
    peft_type: 'LORA',
    r: adapter.lora_rank,
    lora_alpha: adapter.lora_alpha,
    target_modules: adapter.lora_target_modules,
    bias: adapter.lora_bias ?? 'none',
    base_model_name_or_path: adapter.base_model_name ?? null
  }
}
