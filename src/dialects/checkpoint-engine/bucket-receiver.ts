import { RefitError } from '../../errors.ts'
import type { RolloutEngine } from '../../contract/rollout-engine.ts'
import type { StoredSource } from '../../contract/weight-source.ts'
import type { UpdatesContext } from '../../http/context.ts'
import { openNamedMemory } from '../../sources/tensor/named-memory.ts'
import { SharedBuffers } from '../../sources/tensor/shared-buffers.ts'
import type { OpenHandle } from '../../sources/tensor/tensor-receiver.ts'
import { checkBuffer, placePiece, readServerMessage } from '../../wire/trainers/checkpoint-engine.ts'
import type { Bucket, ServerMessage } from '../../wire/trainers/checkpoint-engine.ts'
import type { TensorDescriptor } from '../../wire/torch/tensor.ts'
import { readNamedMemory } from '../../wire/trainers/verl-buckets.ts'
import type { Peers } from './peers.ts'

const BUFFER = 'the buffer'

/** Takes the contents of the buffers, bucket by bucket. */
export interface BucketSink {
  /** It takes the tensors of a LoRA adapter (default: those of the model). */
  readonly isAdapter?: true
  /** Called once the buffers are open, before the first bucket. */
  begin: () => Promise<void>
  /** Takes all of a source, and closes it. Its bytes are overwritten when this has returned. */
  write: (source: StoredSource) => Promise<void>
  /** No bucket so far had a tensor of use. */
  readonly isEmpty: boolean
}

/** Receives the buckets of one exchange, which all peers send through their buffers. */
export class BucketReceiver {
  readonly #engine: RolloutEngine
  readonly #tensors: UpdatesContext['tensors']
  readonly #peers: Peers
  readonly #sink: BucketSink
  #buffers: SharedBuffers | undefined
  #handles: readonly OpenHandle[] = []
  /** The bytes of the last messages. */
  #bodies: readonly Buffer[] = []

  constructor ({ engine, tensors }: Pick<UpdatesContext, 'engine' | 'tensors'>, peers: Peers, sink: BucketSink) {
    this.#engine = engine
    this.#tensors = tensors
    this.#peers = peers
    this.#sink = sink
  }

  /**
   * Receives all buckets and closes the buffers. The peers then wait for the reply to their last message, which tells
   * them the outcome. Throws Stopped if the parameter server ends the exchange.
   */
  async receive (): Promise<void> {
    const messages = await this.#peers.receive()
    await this.#open(messages)
    await this.#sink.begin()
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
      read.push(index > 0 && body.equals(bodies[0]!) ? read[0]! : readServerMessage(body, this.#sink.isAdapter))
    }
    const stop = read.find(message => message.type === 'stop')
    if (stop !== undefined) throw new Stopped(stop.reason)
    return read
  }

  async #write (buffers: SharedBuffers, tensors: TensorDescriptor[][]): Promise<void> {
    await this.#sink.write(buffers.filled(tensors))
  }

  /** The first None means that the buffers are no longer read, the second one that the exchange is complete. */
  async #end (): Promise<void> {
    if (this.#sink.isEmpty) {
      throw new RefitError('WEIGHTS_INCOMPLETE', 'the parameter server has sent no weight of this model')
    }
    await this.#buffers!.close()
    this.#peers.reply()
    const messages = await this.#next()
    if (messages.some(({ type }) => type !== 'none')) {
      throw new RefitError('ZMQ_PROTOCOL', 'the parameter server sent another bucket after it had freed its buffer')
    }
  }

  /** verl's sender frees the buffer when it has the reply to its last bucket. */
  async #endVerl (): Promise<void> {
    if (this.#sink.isEmpty) throw new RefitError('WEIGHTS_INCOMPLETE', 'verl has sent no weight of this model')
    await this.#buffers!.close()
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

/** The parameter server has ended the exchange. */
export class Stopped extends Error {
  constructor (reason: string) {
    super(`the parameter server gave the update up: ${reason}`)
  }
}

/** `outcome`: what has changed here. */
export function stoppedRefusal (error: unknown, outcome: string): unknown {
  return error instanceof Stopped ? new RefitError('CONFLICT', `${error.message}. ${outcome}`) : error
}
