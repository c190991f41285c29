import { RefitError } from '../../errors.ts'
import { runUpdate } from '../../updates/run-update.ts'
import type { UpdateFields } from '../../updates/run-update.ts'
import type { UpdatesContext } from '../../http/context.ts'
import { updateFromDisk } from '../../updates/disk-update.ts'
import type { Packing } from '../../sources/distributed/broadcasts.ts'
import type { Fetched } from '../../deltas/delta-store.ts'
import { PackedOffers } from '../../sources/tensor/packed-offers.ts'
import type { DeltaCheckpoint, DeltaVersion } from '../../deltas/weight-pulls.ts'
import type { WriteReport } from '../../contract/weight-source.ts'
import type { Offer } from '../../wire/torch/offer.ts'
import { readInitInfo, toPacking } from './init-info.ts'
import type { PackingFields } from './init-info.ts'
import { readUpdateInfo } from './update-info.ts'
import type { BroadcastInfo, DeltaUpdate, DiskInfo, HandlesInfo, UpdateInfo } from './update-info.ts'
import { memoize } from '../memoize.ts'

export interface Broadcast {
  names: readonly string[]
  dtypes: readonly string[]
  shapes: ReadonlyArray<readonly number[]>
  groupName: string
  packing: Packing
}

/**
 * vLLM's weight transfer engine; a server has one for all dialects. Calls: init once, then start, any number of
 * updates, finish.
 */
export class WeightTransfer {
  readonly #context: UpdatesContext
  readonly #packed: PackedOffers
  #group: string | null = null
  #packing: PackingFields = {}
  /** The tensors of the last broadcast since the init; an update with empty lists repeats them. */
  #announced: Lists | null = null
  /** The checkpoint that SkyRL's deltas change. */
  #deltas: DeltaCheckpoint | null = null
  /** A start without a finish so far. */
  #isStarted = false

  constructor (context: UpdatesContext) {
    const { engine: { info }, tensors, kept } = context
    this.#context = context
    this.#packed = new PackedOffers({ tensors, kept, ranks: info.ranks, gpus: info.gpus.map(({ uuid }) => uuid) })
  }

  /**
   * Joins a trainer's group and resolves when all ranks have joined. Handles and files need no group. Leaves the group
   * of an earlier init.
   */
  async init (value: unknown): Promise<void> {
    const { group, packing, delta } = readInitInfo(value)
    const host = delta === null
      ? null
      : await this.#context.pulls.host(delta.local_checkpoint_dir, delta.base_model_path)
    if (group !== null) await this.#context.groups.init(group, { renew: true })
    if (this.#group !== null && this.#group !== group?.name) await this.#context.groups.destroy(this.#group)
    this.#group = group?.name ?? null
    this.#deltas = host
    this.#packing = packing
    this.#announced = null
    await this.#packed.end()
  }

  /** Leaves the trainer's group. Another init may follow. */
  async shutdown (): Promise<void> {
    const group = this.#group
    this.#group = this.#deltas = this.#announced = null
    this.#packing = {}
    if (group !== null) await this.#context.groups.destroy(group)
    await this.#packed.end()
  }

  /** Begins an update of many requests, and aborts one that a crashed trainer left open. */
  async start (
    { owner, checkpointFormat = true }: { owner: string, checkpointFormat?: boolean | undefined }
  ): Promise<void> {
    if (!checkpointFormat) {
      throw new RefitError(
        'UNSUPPORTED',
        "is_checkpoint_format: false means the layout of vLLM's kernels; send weights in the layout of checkpoints",
        { param: 'is_checkpoint_format' }
      )
    }
    await this.#context.engine.transactions.open({ scope: true, owner })
    this.#isStarted = true
    await this.#packed.end()
  }

  /**
   * Receives and writes, and replies after that. The call is part of the update that was started, else an update of its
   * own. With `inScope` it is refused if no update was started. A call equal to a running call gets that call's
   * outcome.
   */
  async update (value: unknown, { inScope = false }: { inScope?: boolean } = {}): Promise<WriteReport> {
    const identity = ['vllm', JSON.stringify(value)]
    const update = this.#read(value, inScope)
    switch (update.kind) {
      case 'disk':
        return await this.#fromDisk(update.info)
      case 'delta':
        return await this.#fromDelta(update.info, identity)
      case 'handles':
        return await this.#fromHandles(update.info, identity)
      case 'broadcast':
        return await this.#fromBroadcast(update.info, identity)
      case 'broken-broadcast':
        return await this.#refuse(identity, async () => await this.#dropBroadcast(update.fields, update.error))
      case 'invalid':
        return await this.#refuse(identity, async () => {
          await this.#discardHandles(value)
          return update.error
        })
    }
  }

  /** For SkyRL: updates this host's checkpoint to a version, while generation goes on. */
  async fetch (version: DeltaVersion): Promise<Fetched> {
    return await this.#context.pulls.fetch(this.#deltaHost(), version)
  }

  /** Moves the label and lets generation go on. Without a start it only moves the label. */
  async finish (version?: string): Promise<void> {
    const { transactions } = this.#context.engine
    const isOpen = transactions.current?.scope === true
    if (isOpen || this.#isStarted) {
      try {
        await transactions.commit(null, version === undefined ? {} : { version })
      } catch (error) {
        // The sender can send the missing tensors and finish again, so it keeps the memory that it has exported.
        if ((error as { code?: unknown }).code === 'TRANSACTION_INCOMPLETE') throw error
        this.#isStarted = false
        await this.#packed.end()
        throw error
      }
      this.#isStarted = false
    } else if (version !== undefined) {
      await this.#context.engine.setWeightVersion(version)
    }
    await this.#packed.end()
  }

  /** Writes a trainer's broadcasts as one update. Broadcasts of a refused update have been received and dropped. */
  async receive (announced: () => Promise<Broadcast> | Broadcast, fields: UpdateFields): Promise<WriteReport> {
    const { report } = await runUpdate(
      this.#context,
      fields,
      async write => await write(await this.#context.distributed.open({ ...await announced(), loadFormat: null }))
    )
    return report
  }

  /** The group that /init_weight_transfer_engine made. Throws CONFLICT if there is none. */
  groupName (): string {
    if (this.#group === null) {
      throw new RefitError(
        'CONFLICT',
        'there is no group of a trainer to receive from: call /init_weight_transfer_engine with master_address, ' +
          'master_port, rank_offset and world_size first'
      )
    }
    return this.#group
  }

  #deltaHost (): DeltaCheckpoint {
    if (this.#deltas === null) {
      throw new RefitError(
        'CONFLICT',
        'there is no checkpoint for deltas: call /init_weight_transfer_engine with base_model_path and ' +
          'local_checkpoint_dir first'
      )
    }
    return this.#deltas
  }

  #read (value: unknown, inScope: boolean): UpdateInfo | { kind: 'invalid', error: unknown } {
    try {
      const update = readUpdateInfo(value)
      if (!inScope || update.kind === 'broken-broadcast' || this.#context.engine.transactions.current?.scope === true) {
        return update
      }
      const error = new RefitError(
        'CONFLICT',
        'no weight update has been started, or it was given up since: call skyrl_start_weight_update before'
      )
      if (update.kind !== 'broadcast') throw error
      return { kind: 'broken-broadcast', fields: update.info, error }
    } catch (error) {
      return { kind: 'invalid', error }
    }
  }

  /** An update that is refused before anything is opened. `error` first releases what its sender has sent. */
  async #refuse (identity: readonly string[], error: () => Promise<unknown>): Promise<never> {
    await runUpdate(this.#context, { identity }, async () => {
      throw await error()
    })
    throw new Error('a refused update has ended without its error')
  }

  async #discardHandles (value: unknown): Promise<void> {
    const entry = (value as { ipc_handles_pickled?: unknown } | null)?.ipc_handles_pickled
    if (typeof entry === 'string' && !this.#packed.holds(entry)) await this.#context.tensors.discard([entry], true)
  }

  async #fromBroadcast (info: BroadcastInfo, identity: readonly string[]): Promise<WriteReport> {
    const lists = isRepeat(info) ? this.#announced : info
    const report = await this.receive(() => {
      const groupName = this.groupName()
      if (lists === null) throw nothingToRepeat()
      const { names, dtype_names: dtypes, shapes } = lists
      return { names, dtypes, shapes, groupName, packing: toPacking(info, this.#packing) }
    }, { ...toFields(info), identity })
    this.#announced = lists
    return report
  }

  async #fromHandles (info: HandlesInfo, identity: readonly string[]): Promise<WriteReport> {
    const { names, dtype_names: dtypes, shapes, ipc_handles_pickled: entry, tensor_sizes: bytes, sizes } = info
    // SkyRL packs each chunk into a new tensor; vLLM packs all chunks into the same tensor.
    const offer: Offer = {
      names,
      dtypes,
      shapes,
      sizes: bytes ?? sizes ?? null,
      unit: bytes == null ? 'elements' : 'bytes'
    }
    const { report } = await runUpdate(this.#context, { ...toFields(info), identity }, async write => {
      // vLLM sends the handle of one buffer again and again.
      if (bytes != null) return await this.#packed.write(entry, offer, write)
      const { source } = await this.#context.tensors.openOffer(entry, offer)
      return await write(source)
    })
    return report
  }

  async #fromDisk (info: DiskInfo): Promise<WriteReport> {
    return (await updateFromDisk(this.#context, { path: info.path, ...toFields(info) })).report
  }

  /** The version is the label, unless the request has one. */
  async #fromDelta (
    { target_version: version, ...info }: DeltaUpdate,
    identity: readonly string[]
  ): Promise<WriteReport> {
    const fields = toFields({ ...info, weight_version: info.weight_version ?? String(version) })
    const path = async (): Promise<string> => await this.#context.pulls.fetched(this.#deltaHost(), version)
    return (await updateFromDisk(this.#context, { path, identity, ...fields })).report
  }

  /** The trainer broadcasts even if a field is invalid. */
  async #dropBroadcast (fields: Readonly<Record<string, unknown>>, error: RefitError): Promise<RefitError> {
    if (this.#group === null) return error
    const { packed, packed_buffer_size_bytes: bytes } = fields
    const { names, dtype_names: dtypes, shapes } = isRepeat(fields) ? this.#announced ?? fields : fields
    const isKnown = error.code !== 'UNSUPPORTED' && (packed === undefined || typeof packed === 'boolean') &&
      (bytes === undefined || (Number.isSafeInteger(bytes) && Number(bytes) >= 0))
    const note = await this.#context.distributed.refuse(
      isKnown ? { names, dtypes, shapes } : {},
      this.#group,
      isKnown ? toPacking(fields as PackingFields, this.#packing) : 'each'
    )
    return note === undefined
      ? error
      : new RefitError(error.code, `${error.message}. ${note}`, error.param === undefined ? {} : { param: error.param })
  }
}

type Lists = Pick<BroadcastInfo, 'names' | 'dtype_names' | 'shapes'>

/** vLLM's trainer announces unchanged tensors only once: its later updates have empty lists. */
function isRepeat (fields: { names?: unknown, dtype_names?: unknown, shapes?: unknown }): boolean {
  return [fields.names, fields.dtype_names, fields.shapes].every(list => Array.isArray(list) && list.length === 0)
}

function nothingToRepeat (): RefitError {
  return new RefitError(
    'INVALID_REQUEST',
    'update_info: names is empty, which repeats the tensors of the update before, and there was none since ' +
      '/init_weight_transfer_engine: send names, dtype_names and shapes. Nothing was received',
    { param: 'update_info.names' }
  )
}

function toFields (
  { weight_version: version, flush_cache: flush }: { weight_version?: string | null, flush_cache?: boolean }
): UpdateFields {
  return { version, flushCache: flush }
}

/** The server's only WeightTransfer. */
export const weightTransferOf = memoize((context: UpdatesContext) => new WeightTransfer(context))
