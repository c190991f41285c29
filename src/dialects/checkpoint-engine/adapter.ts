import type { AdapterReport } from '../../contract/adapters.ts'
import type { StoredSource } from '../../contract/weight-source.ts'
import { errorMessage, RefitError } from '../../errors.ts'
import type { UpdatesContext } from '../../http/context.ts'
import { copyTensors } from '../../sources/tensor/copied-tensors.ts'
import { firstOfEach } from '../../sources/tensor/tensor-receiver.ts'
import { FROM_TENSORS, loadAdapterFromSource, requireAdapters } from '../../updates/adapter-load.ts'
import type { AdapterFields } from '../../updates/adapter-load.ts'
import { joinSources } from '../../updates/join-sources.ts'
import { BucketReceiver, Stopped, stoppedRefusal } from './bucket-receiver.ts'
import type { BucketSink } from './bucket-receiver.ts'
import type { Peers, Slot } from './peers.ts'

export interface IpcAdapter extends AdapterFields {
  /** The content of adapter_config.json. */
  readonly config: unknown
}

type Context = Pick<UpdatesContext, 'adapterRetries' | 'engine' | 'metrics' | 'tensors' | 'updates'>

/**
 * Loads an adapter whose tensors come in the buckets of one exchange. Until the last bucket has come, the version
 * before stays. The buckets of a refused adapter are received and dropped first, because verl's workers send all of
 * them, whatever the replies.
 */
export async function runIpcAdapter (
  context: Context,
  slots: readonly Slot[],
  adapter: IpcAdapter,
  /** As in runIpcUpdate. */
  link: { connect: () => Promise<Peers>, end: () => void }
): Promise<AdapterReport> {
  return await context.adapterRetries.join(
    ['ipc', ...slots.map(({ endpoint }) => endpoint), JSON.stringify(adapter)],
    async () => await receive(context, adapter, link)
  )
}

async function receive (
  context: Context,
  { config, ...fields }: IpcAdapter,
  { connect, end }: { connect: () => Promise<Peers>, end: () => void }
): Promise<AdapterReport> {
  // A load that is refused at once still receives what is sent.
  const connecting = connect()
  connecting.catch(() => {})
  let receiver: BucketReceiver | undefined
  let isStopped = false
  const open = async (): Promise<StoredSource> => {
    const tensors = new CollectedTensors(context, config)
    receiver = new BucketReceiver(context, await connecting, tensors)
    try {
      await receiver.receive()
    } catch (error) {
      isStopped = error instanceof Stopped
      throw stoppedRefusal(error, 'Nothing has changed')
    }
    return tensors.joined()
  }
  let peers: Peers | undefined
  try {
    const report = await loadAdapterFromSource(context, fields, { config, open, path: FROM_TENSORS })
    peers = await connecting
    peers.reply()
    return report
  } catch (error) {
    peers = await connecting.catch(() => undefined)
    if (!isStopped) await peers?.dismiss(errorMessage(error))
    throw error
  } finally {
    await receiver?.close()
    peers?.close()
    end()
  }
}

/** The tensors of the buckets so far, in host memory. All peers send the whole adapter: the first one's is read. */
class CollectedTensors implements BucketSink {
  readonly isAdapter = true
  readonly #engine: Context['engine']
  readonly #config: unknown
  readonly #parts: StoredSource[] = []
  #bytes = 0

  constructor ({ engine }: Pick<Context, 'engine'>, config: unknown) {
    this.#engine = engine
    this.#config = config
  }

  get isEmpty (): boolean {
    return this.#parts.length === 0
  }

  async begin (): Promise<void> {}

  async write (source: StoredSource): Promise<void> {
    try {
      const tensors = firstOfEach(source.tensors)
      // Only tensors that fit the model are kept, each once.
      requireAdapters(this.#engine).missingOf?.(this.#config, [
        ...this.#parts.flatMap(part => part.tensors),
        ...tensors
      ])
      const part = await copyTensors(source, tensors, this.#engine.deltaHost?.fetch)
      this.#parts.push(part)
      // A copy reaches from its first tensor to its last, with what lies between.
      this.#bytes += part.sources.reduce((sum, copy) => sum + ('buffer' in copy ? copy.buffer.byteLength : 0), 0)
      const most = this.#engine.info.weightBytes
      if (this.#bytes > most) {
        throw new RefitError(
          'ADAPTER_REFUSED',
          `the adapter's buckets take ${this.#bytes} bytes so far, more than the model's weights (${most}); send its ` +
            'tensors one after another, without others between them'
        )
      }
    } finally {
      await source.close()
    }
  }

  joined (): StoredSource {
    return joinSources(this.#parts)
  }
}
