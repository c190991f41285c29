import type { AdapterReport } from '../../contract/adapters.ts'
import { errorMessage, RefitError } from '../../errors.ts'
import type { ErrorCode } from '../../errors.ts'
import type { UpdatesContext } from '../../http/context.ts'
import { loadAdapterFromDisk } from '../../updates/adapter-load.ts'
import { runTransaction } from '../../updates/run-transaction.ts'
import type { TransactionPart } from '../../updates/run-transaction.ts'
import { updateFromDisk } from '../../updates/disk-update.ts'
import { StateDicts } from './stream.ts'
import { memoize } from '../memoize.ts'

export interface Broadcaster {
  host: string
  port: number
  rankOffset: number
  inferenceWorldSize: number
  backend: string
  quantized: boolean
  session: string | null
}

const GROUP = 'prime-rl'
/** Longest that one update may take; each broadcast has the group's own limit. */
const UPDATE_MS = 3600_000
/** Errors that prime-rl gets with their own code: a retry cannot succeed, but no broadcast was lost. */
const KEPT_CODES: ReadonlySet<ErrorCode> = new Set<ErrorCode>(['DEVICE_LOST', 'ENGINE_CLOSED'])

/** The updates that prime-rl's orchestrator requests and its trainer broadcasts; an engine has one of each. */
class PrimeRl {
  readonly #context: UpdatesContext
  /** The last update that named a folder. */
  #last: { folder: string, error: unknown } | null = null

  constructor (context: UpdatesContext) {
    this.#context = context
  }

  async init ({ host, port, rankOffset, inferenceWorldSize, backend, quantized, session }: Broadcaster): Promise<void> {
    if (session !== null) {
      throw new RefitError(
        'UNSUPPORTED',
        'session_id: weights over NIXL and ModelExpress are not supported; ' +
          'set weight_broadcast.type to "nccl" or "filesystem"',
        { param: 'session_id' }
      )
    }
    if (quantized) {
      throw new RefitError(
        'UNSUPPORTED',
        "quantize_in_weight_transfer: this server takes weights in the layout of checkpoints, not of vLLM's " +
          'kernels; set it to false',
        { param: 'quantize_in_weight_transfer' }
      )
    }
    // The trainer has rank 0.
    await this.#context.groups.init({
      name: GROUP,
      backend,
      form: 'vllm',
      address: host,
      port,
      rankOffset: rankOffset + 1,
      worldSize: inferenceWorldSize + 1
    }, { renew: true })
    this.#last = null
  }

  /**
   * prime-rl repeats a request that got no reply: the repeat joins the running update or gets the outcome of the last
   * one.
   */
  async update (folder: string | null): Promise<AdapterReport | undefined> {
    const { groups } = this.#context
    const isJoined = groups.list.some(({ name }) => name === GROUP)
    if (!isJoined && folder === null) {
      throw new RefitError(
        'INVALID_REQUEST',
        'weight_dir: null, and there is no process group: call /init_broadcaster first, or name a checkpoint',
        { param: 'weight_dir' }
      )
    }
    if (isJoined) await this.#broadcast(folder)
    else return await this.#fromFolder(folder!)
    return undefined
  }

  /** A folder with an adapter is loaded under the name of the base model, which then means the adapter. */
  async #fromFolder (path: string): Promise<AdapterReport | undefined> {
    if (await this.#context.isAdapter(path)) {
      return await loadAdapterFromDisk(this.#context, { name: this.#context.engine.info.servedModelName, path })
    }
    // prime-rl separates prefixes of different weights by cache_salt and never flushes.
    await updateFromDisk(this.#context, { path, flushCache: false })
    return undefined
  }

  async #broadcast (folder: string | null): Promise<void> {
    const last = this.#last
    if (last !== null && last.folder === folder) {
      if (last.error !== null) throw last.error
      return
    }
    const ended = (error: unknown): void => {
      if (folder !== null) this.#last = { folder, error }
    }
    try {
      await this.#receive(folder)
      ended(null)
    } catch (error) {
      const final = spent(error)
      ended(final)
      throw final
    }
  }

  /**
   * All state dicts are one transaction. Nothing is generated before the last one, and an abort in the middle leaves
   * torn weights; with a second set of weights generation goes on, and an abort changes nothing.
   */
  async #receive (folder: string | null): Promise<void> {
    const group = this.#context.groups.get(GROUP)
    const options = {
      owner: `prime-rl's update${folder === null ? '' : ` from ${folder}`}`,
      deadlineMs: UPDATE_MS,
      identity: ['prime-rl', JSON.stringify(folder)],
      flushCache: false
    }
    await runTransaction(this.#context, options, async part => {
      await part.begin().catch((error: unknown) => {
        // The trainer broadcasts anyway, and the next update would read these state dicts as its own.
        group.abandon(`an update was refused before anything of it was received: ${errorMessage(error)}`)
        throw error
      })
      const { distributed, engine } = this.#context
      const dicts = new StateDicts(group, distributed, engine.weightSets !== undefined)
      await this.#write(part, dicts, () => group.failure !== null)
    })
  }

  /** After a refused state dict the others are received and dropped, because the trainer sends them all. */
  async #write (part: TransactionPart, dicts: StateDicts, isBroken: () => boolean): Promise<void> {
    let refusal: unknown
    const count = await dicts.count()
    for (let index = 1; index <= count; index++) {
      try {
        const source = await dicts.open(`state dict ${index} of ${count}`)
        if (refusal === undefined) await part.write(source)
        else await source.close()
      } catch (error) {
        refusal ??= error
        // If the group is broken, the other state dicts will never come.
        if (isBroken()) break
      }
    }
    if (refusal !== undefined) throw refusal
    if (part.isEmpty) {
      throw new RefitError(
        'WEIGHTS_INCOMPLETE',
        `the trainer has sent ${count} state dicts, and no weight of this model`
      )
    }
  }
}

const primeRl = memoize((context: UpdatesContext) => new PrimeRl(context))

/** Joins the group of prime-rl's trainer; resolves when the communicator is ready. */
export async function initPrimeRl (context: UpdatesContext, broadcaster: Broadcaster): Promise<void> {
  await primeRl(context).init(broadcaster)
}

/**
 * prime-rl's `/update_weights`: over NCCL if there is a group, even if it names a folder; else from the folder. Returns
 * the report if the folder has an adapter.
 */
export async function updatePrimeRl (
  context: UpdatesContext,
  { weight_dir: folder }: { weight_dir?: string | null }
): Promise<AdapterReport | undefined> {
  return await primeRl(context).update(folder ?? null)
}

/** prime-rl would retry after a 5xx, but its trainer does not broadcast again, so the error becomes BROADCAST_SPENT. */
function spent (error: unknown): unknown {
  if (!(error instanceof RefitError) || error.statusCode < 500 || KEPT_CODES.has(error.code)) return error
  return new RefitError('BROADCAST_SPENT', `${error.code}: ${error.message}`, { cause: error })
}
