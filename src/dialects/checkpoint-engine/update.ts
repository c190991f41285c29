import type { RolloutEngine } from '../../contract/rollout-engine.ts'
import { errorMessage, RefitError, withPrefix } from '../../errors.ts'
import { runTransaction } from '../../updates/run-transaction.ts'
import type { TransactionPart } from '../../updates/run-transaction.ts'
import type { UpdatesContext } from '../../http/context.ts'
import { openNamedMemory } from '../../sources/tensor/named-memory.ts'
import { SharedBuffers } from '../../sources/tensor/shared-buffers.ts'
import type { OpenHandle } from '../../sources/tensor/tensor-receiver.ts'
import { checkBuffer, placePiece, readServerMessage } from '../../wire/trainers/checkpoint-engine.ts'
import type { Bucket, ServerMessage } from '../../wire/trainers/checkpoint-engine.ts'
import type { TensorDescriptor } from '../../wire/torch/tensor.ts'
import { readNamedMemory } from '../../wire/trainers/verl-buckets.ts'
import type { WriteReport } from '../../contract/weight-source.ts'
import type { Peers, Slot } from './peers.ts'

export interface IpcOptions {
  flushCache: boolean
  version: string | null
  /** Id of the transaction that it belongs to; null: a new one, or the trainer's open scope. */
  transaction: string | null
  /** Longest time of the whole update. */
  deadlineMs: number
}

const FAILED = 'IPC weight update failed: '
const BUFFER = 'the buffer'

/** One exchange with a parameter server: many buckets through the same buffers are one update. */
export async function runIpcUpdate (
  context: Pick<UpdatesContext, 'engine' | 'metrics' | 'retries' | 'tensors' | 'updates'>,
  slots: readonly Slot[],
  options: IpcOptions,
  /** Not called by a call that joins a running one; nor is `end`, which is called last. */
  { connect, end }: { connect: () => Promise<Peers>, end: () => void }
): Promise<WriteReport> {
  let peers: Peers | undefined
  let update: IpcUpdate | undefined
  let dismissed: Promise<void> | undefined
  return await runTransaction(context, {
    ...options,
    owner: `checkpoint-engine (${slots[0]!.endpoint})`,
    identity: ['checkpoint-engine', ...slots.map(({ endpoint }) => endpoint)],
    joinsScope: true,
    explain: (error, isOld) => peers === undefined ? error : withPrefix(FAILED, toRefusal(error, isOld)),
    close: async () => {
      try {
        await dismissed
        await update?.close()
      } finally {
        peers?.close()
        end()
      }
    }
  }, async part => {
    peers = await connect()
    try {
      update = new IpcUpdate(context, peers, part)
      await update.run()
    } catch (error) {
      // The peers get the error at once; the engine need not wait until they have stopped.
      if (!(error instanceof Stopped)) dismissed = peers.dismiss(`${FAILED}${errorMessage(error)}`)
      throw error
    }
  })
}

class IpcUpdate {
  readonly #engine: RolloutEngine
  readonly #tensors: UpdatesContext['tensors']
  readonly #peers: Peers
  readonly #part: TransactionPart
  #buffers: SharedBuffers | undefined
  #handles: readonly OpenHandle[] = []
  /** The bytes of the last messages. */
  #bodies: readonly Buffer[] = []

  constructor ({ engine, tensors }: Pick<UpdatesContext, 'engine' | 'tensors'>, peers: Peers, part: TransactionPart) {
    this.#engine = engine
    this.#tensors = tensors
    this.#peers = peers
    this.#part = part
  }

  /** Replies to the peers until they are done. */
  async run (): Promise<void> {
    const messages = await this.#peers.receive()
    await this.#open(messages)
    await this.#part.begin()
    this.#peers.reply()
    await this.#exchange()
  }

  async close (): Promise<void> {
    await this.#buffers?.close()
  }

  async #open (messages: readonly Buffer[]): Promise<void> {
    const { slots } = this.#peers
    // postMessage to the thread that opens handles clones the whole buffer behind a view, so the bytes are copied
    // first.
    const { handles, buffers } = await this.#openAll(
      messages.map((bytes, index) => async () => {
        const named = readNamedMemory(bytes)
        return named === null
          ? await this.#tensors.openHandle(BUFFER, new Uint8Array(bytes), slots[index]!.gpu)
          : await openNamedMemory(named, BUFFER)
      }),
      buffers => {
        this.#buffers = buffers
      }
    )
    this.#handles = handles
    this.#buffers = buffers
    for (const { tensor } of handles) checkBuffer(tensor)
  }

  /**
   * Opens one buffer for each slot. `take` gets them before an error is thrown, because the caller closes them in any
   * case.
   */
  async #openAll (
    opens: ReadonlyArray<() => Promise<OpenHandle>>,
    take: (buffers: SharedBuffers) => void
  ): Promise<{ handles: OpenHandle[], buffers: SharedBuffers }> {
    const opened = await Promise.allSettled(opens.map(async open => await open()))
    const handles = opened.flatMap(one => one.status === 'fulfilled' ? [one.value] : [])
    const bufferOf: number[] = []
    for (const [index, { ranks }] of this.#peers.slots.entries()) for (const rank of ranks) bufferOf[rank] = index
    const buffers = new SharedBuffers({
      buffers: handles,
      bufferOf,
      closeMappings: this.#engine.closeMappings?.bind(this.#engine)
    })
    take(buffers)
    const failed = opened.find(one => one.status === 'rejected')
    if (failed !== undefined) throw failed.reason
    return { handles, buffers }
  }

  async #exchange (): Promise<void> {
    for (;;) {
      const messages = await this.#next()
      const { type } = messages[0]!
      const other = messages.find(message => message.type !== type)
      if (other !== undefined) {
        throw new RefitError(
          'ZMQ_PROTOCOL',
          `ranks of the parameter server are not at the same step: one sent a ${type}, another a ${other.type}`
        )
      }
      if (type === 'none') return await this.#end()
      const buckets = messages.filter(message => message.type === 'bucket')
      requireSame(buckets)
      if (buckets[0]!.isDirect === true) await this.#writeDirect(buckets)
      else if (buckets[0]!.pieces.length > 0) {
        await this.#write(
          this.#buffers!,
          this.#handles.map(({ tensor }, index) => buckets[index]!.pieces.map(piece => placePiece(piece, tensor)))
        )
      }
      if (buckets[0]!.isLast === true) return await this.#endVerl()
      this.#peers.reply()
    }
  }

  /** verl sends a tensor that is larger than its buffer by a handle to the tensor itself. */
  async #writeDirect (buckets: readonly Bucket[]): Promise<void> {
    const { slots } = this.#peers
    let opened: SharedBuffers | undefined
    try {
      const { handles, buffers } = await this.#openAll(
        this.#bodies.map((bytes, index) => async () =>
          await this.#tensors.openHandle(BUFFER, new Uint8Array(bytes), slots[index]!.gpu)
        ),
        buffers => {
          opened = buffers
        }
      )
      await this.#write(
        buffers,
        handles.map(({ tensor }, index) => [{ ...tensor, name: buckets[index]!.pieces[0]!.name }])
      )
    } finally {
      await opened?.close()
    }
  }

  async #next (): Promise<ServerMessage[]> {
    const bodies = await this.#peers.receive()
    this.#bodies = bodies
    const read: ServerMessage[] = []
    // All ranks send equal bytes, so they are read once.
    for (const [index, body] of bodies.entries()) {
      read.push(index > 0 && body.equals(bodies[0]!) ? read[0]! : readServerMessage(body))
    }
    const stop = read.find(message => message.type === 'stop')
    if (stop !== undefined) throw new Stopped(stop.reason)
    return read
  }

  async #write (buffers: SharedBuffers, tensors: TensorDescriptor[][]): Promise<void> {
    await this.#part.write(buffers.filled(tensors))
  }

  /** The first None means that the buffers are no longer read, the second one that the update is complete. */
  async #end (): Promise<void> {
    if (this.#part.isEmpty) {
      throw new RefitError('WEIGHTS_INCOMPLETE', 'the parameter server has sent no weight of this model')
    }
    await this.#buffers!.close()
    this.#peers.reply()
    const messages = await this.#next()
    if (messages.some(({ type }) => type !== 'none')) {
      throw new RefitError('ZMQ_PROTOCOL', 'the parameter server sent another bucket after it had freed its buffer')
    }
    await this.#part.commit()
    this.#peers.reply()
  }

  /** Replies to verl's last bucket after the commit, because its sender then frees the buffer. */
  async #endVerl (): Promise<void> {
    if (this.#part.isEmpty) throw new RefitError('WEIGHTS_INCOMPLETE', 'verl has sent no weight of this model')
    await this.#buffers!.close()
    await this.#part.commit()
    this.#peers.reply()
  }
}

/** All ranks advance together, so their buckets must be equal. Throws ZMQ_PROTOCOL. */
function requireSame ([first, ...others]: readonly Bucket[]): void {
  for (const [index, other] of others.entries()) {
    // Equal bytes were read once and are the same object.
    if (other === first) continue
    const refuse = (what: string): RefitError =>
      new RefitError(
        'ZMQ_PROTOCOL',
        `senders are not at the same step: ${what} (socket ${index + 1} and the first one)`
      )
    if (other.isLast === true !== (first!.isLast === true)) {
      throw refuse('for one this bucket is the last one, for another it is not')
    }
    if (other.isDirect === true !== (first!.isDirect === true)) {
      throw refuse('one sent a tensor by its own handle, another a bucket')
    }
    if (other.pieces.length !== first!.pieces.length) {
      throw refuse(`one sent a bucket of ${other.pieces.length} tensors, another of ${first!.pieces.length}`)
    }
    const at = other.pieces.findIndex(({ name }, piece) => name !== first!.pieces[piece]!.name)
    if (at >= 0) {
      throw refuse(
        `tensor ${at} of the bucket is ${other.pieces[at]!.name} for one, ${first!.pieces[at]!.name} for another`
      )
    }
  }
}

/** The parameter server has aborted the update. */
class Stopped extends Error {
  constructor (reason: string) {
    super(`the parameter server gave the update up: ${reason}`)
  }
}

function toRefusal (error: unknown, isOld: boolean): unknown {
  if (!(error instanceof Stopped)) return error
  return new RefitError(
    'CONFLICT',
    `${error.message}. ${isOld ? 'Nothing has changed' : 'Earlier buckets have been written'}`
  )
}
