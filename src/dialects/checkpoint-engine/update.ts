import type { RolloutEngine } from '../../contract/rollout-engine.ts'
import { errorMessage, RefitError, withPrefix } from '../../errors.ts'
import { runTransaction } from '../../updates/run-transaction.ts'
import type { TransactionPart } from '../../updates/run-transaction.ts'
import type { RouteContext } from '../../http/context.ts'
import { openNamedMemory } from '../../sources/tensor/named-memory.ts'
import { SharedBuffers } from '../../sources/tensor/shared-buffers.ts'
import type { OpenHandle } from '../../sources/tensor/tensor-receiver.ts'
import { checkBuffer, placePiece, readServerMessage } from '../../wire/trainers/checkpoint-engine.ts'
import type { Bucket, ServerMessage } from '../../wire/trainers/checkpoint-engine.ts'
import type { TensorDescriptor } from '../../wire/torch/tensor.ts'
import { readNamedMemory } from '../../wire/trainers/verl-buckets.ts'
import type { WriteReport } from '../../contract/weight-source.ts'
import type { Peers, Seat } from './peers.ts'

export interface IpcOptions {
  flushCache: boolean
  version: string | null
  /** Of the transaction that it belongs to; null: one of its own, or the trainer's scope that is open. */
  transaction: string | null
  /** For all of it. */
  deadlineMs: number
}

const FAILED = 'IPC weight update failed: '
const BUFFER = 'the buffer'

/** One exchange with a parameter server: bucket after bucket out of the same buffers, all of them one update. */
export async function runIpcUpdate (
  context: Pick<RouteContext, 'engine' | 'metrics' | 'retries' | 'tensors'>,
  seats: readonly Seat[],
  options: IpcOptions,
  connect: () => Promise<Peers>
): Promise<WriteReport> {
  let peers: Peers | undefined
  let update: IpcUpdate | undefined
  let dismissed: Promise<void> | undefined
  const explain = (error: unknown, isOld: boolean): unknown =>
    peers === undefined ? error : withPrefix(FAILED, toRefusal(error, isOld))
  const owner = `checkpoint-engine (${seats[0]!.endpoint})`
  try {
    return await runTransaction(context, { ...options, owner, joinsScope: true, explain }, async part => {
      peers = await connect()
      try {
        update = new IpcUpdate(context, peers, part)
        await update.run()
      } catch (error) {
        // The peers are told at once; until they have stopped, they need nothing of the engine.
        if (!(error instanceof Stopped)) dismissed = peers.dismiss(`${FAILED}${errorMessage(error)}`)
        throw error
      }
    })
  } finally {
    await dismissed
    await update?.close()
    peers?.close()
  }
}

class IpcUpdate {
  readonly #engine: RolloutEngine
  readonly #tensors: RouteContext['tensors']
  readonly #peers: Peers
  readonly #part: TransactionPart
  #buffers: SharedBuffers | undefined
  #handles: readonly OpenHandle[] = []
  /** The last messages, as they came. */
  #bodies: readonly Buffer[] = []

  constructor ({ engine, tensors }: Pick<RouteContext, 'engine' | 'tensors'>, peers: Peers, part: TransactionPart) {
    this.#engine = engine
    this.#tensors = tensors
    this.#peers = peers
    this.#part = part
  }

  /** Answers until the other side is done. */
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
    const { seats } = this.#peers
    // Copies: of a view, all that it views would be sent to the thread that opens it.
    const { handles, buffers } = await this.#openAll(
      messages.map((bytes, index) => async () => {
        const named = readNamedMemory(bytes)
        return named === null
          ? await this.#tensors.openHandle(BUFFER, new Uint8Array(bytes), seats[index]!.card)
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

  /** One for each seat. `take`: they are the caller's to close, also where some cannot be opened. */
  async #openAll (
    opens: ReadonlyArray<() => Promise<OpenHandle>>,
    take: (buffers: SharedBuffers) => void
  ): Promise<{ handles: OpenHandle[], buffers: SharedBuffers }> {
    const opened = await Promise.allSettled(opens.map(async open => await open()))
    const handles = opened.flatMap(one => one.status === 'fulfilled' ? [one.value] : [])
    const bufferOf: number[] = []
    for (const [index, { ranks }] of this.#peers.seats.entries()) for (const rank of ranks) bufferOf[rank] = index
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
      demandSame(buckets)
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

  /** What is larger than verl's buffer: where its sender has it. */
  async #writeDirect (buckets: readonly Bucket[]): Promise<void> {
    const { seats } = this.#peers
    let opened: SharedBuffers | undefined
    try {
      const { handles, buffers } = await this.#openAll(
        this.#bodies.map((bytes, index) => async () =>
          await this.#tensors.openHandle(BUFFER, new Uint8Array(bytes), seats[index]!.card)
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
    // Ranks send the same, to the byte.
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

  /** The first None: the buffers are not read any more. The second: that was all. */
  async #end (): Promise<void> {
    if (this.#part.isEmpty) {
      throw new RefitError('WEIGHTS_INCOMPLETE', 'the parameter server has sent no tensor')
    }
    await this.#buffers!.close()
    this.#peers.reply()
    const messages = await this.#next()
    if (messages.some(({ type }) => type !== 'none')) {
      throw new RefitError('ZMQ_PROTOCOL', 'the parameter server sent more after it had taken its buffer back')
    }
    await this.#part.commit()
    this.#peers.reply()
  }

  /** verl's last bucket is written, and is answered when all is done: its sender frees the buffer then. */
  async #endVerl (): Promise<void> {
    if (this.#part.isEmpty) throw new RefitError('WEIGHTS_INCOMPLETE', 'verl has sent no tensor')
    await this.#buffers!.close()
    await this.#part.commit()
    this.#peers.reply()
  }
}

/** All ranks go on together: what the first one says of a bucket has to hold for all. Throws ZMQ_PROTOCOL. */
function demandSame ([first, ...others]: readonly Bucket[]): void {
  for (const [index, other] of others.entries()) {
    // The same bytes were read once.
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

/** The other side has given up. */
class Stopped extends Error {
  constructor (reason: string) {
    super(`the parameter server gave the update up: ${reason}`)
  }
}

function toRefusal (error: unknown, isOld: boolean): unknown {
  if (!(error instanceof Stopped)) return error
  return new RefitError(
    'CONFLICT',
    `${error.message}. ${isOld ? 'Nothing has changed' : 'What came before has been written'}`
  )
}
