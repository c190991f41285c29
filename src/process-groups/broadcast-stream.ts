import type { StreamPiece, WeightStream } from '../contract/weight-stream.ts'
import type { Access } from '../native/addon.ts'
import type { WriteJob } from '../native/write-job.ts'
import type { Places } from './direct-places.ts'
import type { Reception, Target } from './reception.ts'
import type { WeightGroup } from './weight-group.ts'
import { bytesIn, joinPieces, slotOf } from './pieces.ts'
import type { Piece } from './pieces.ts'
import { errorMessage } from '../errors.ts'

/** How long the sender of an abandoned update may take to send the rest. */
const HURRY_MS = 5000

/** `end`: index of the piece after it. */
interface Incoming extends Reception {
  piece: Piece
  end: number
  into: Target
}

/**
 * The broadcasts that one request has announced, as a stream of pieces. The next piece is received while the previous
 * one is written, and the receive after it is queued as soon as a slot is free.
 *
 * The sender broadcasts whether or not the request was refused, in the order of the requests. `close` therefore
 * receives and drops the bytes that were not taken. Pieces that can go straight into the weights are received there,
 * many in one go; other pieces go into a slot.
 */
export class BroadcastStream implements WeightStream {
  readonly #group: WeightGroup
  readonly #pieces: readonly Piece[]
  /** Names the tensors of a piece, for messages. */
  readonly #names: (piece: Piece) => string
  readonly #runBytes: number
  #places: Places = []
  /** The weights that it goes to. */
  #access: Access = {}
  #started = 0
  #touched = false
  /** Running receives in order; at most two, of which the second goes into a slot. */
  readonly #incoming: Incoming[] = []
  #given = 0
  #isRefused = false
  #dropping: Promise<void> | undefined
  #changed: () => void = () => {}
  #change = new Promise<void>(resolve => {
    this.#changed = resolve
  })
  #end: () => void = () => {}
  /** Resolves once all pieces have arrived, or no more will. */
  readonly ended = new Promise<void>(resolve => {
    this.#end = resolve
  })
  hasEnded = false
  /** A sentence about the bytes that were received and dropped; undefined if there were none. */
  dropped: string | undefined

  /**
   * `runBytes`: the most bytes that are received straight into the weights in one run. Between two runs the GPU waits
   * for this process.
   */
  constructor (group: WeightGroup, pieces: readonly Piece[], names: (piece: Piece) => string, runBytes: number) {
    this.#group = group
    this.#pieces = pieces
    this.#names = names
    this.#runBytes = runBytes
  }

  async ready (): Promise<void> {
    if (this.#pieces.length === 0) return
    await this.#turn(false)
    await this.#group.ready()
    // A receive that needs no gate begins early, so generation does not stop for a sender that never sends.
    if (!this.#group.needsGate) await this.#receive()?.arrive()
  }

  prepare (job: WriteJob, access: Access): void {
    this.#access = access
    // A receive that needs no gate has staged the first piece by now.
    if (this.#started > 0 || this.#pieces.length === 0) return
    this.#places = this.#group.places(this.#pieces, job, access.set ?? 0)
  }

  /** It is received into host memory, and the gate stays open. */
  receiveBeside (): void {
    this.#access = { beside: true }
  }

  get touched (): boolean {
    return this.#touched
  }

  async next (): Promise<StreamPiece | undefined> {
    if (this.#started === 0 && this.#pieces.length > 0) {
      await this.#turn(true)
      await this.#group.ready()
    }
    const incoming = this.#incoming[0] ?? this.#receive()
    if (incoming === undefined) {
      this.#finish()
      return undefined
    }
    const { piece: { begin, length }, end, into } = incoming
    // The slot of the previous piece is free: it has been written.
    if (
      this.#group.isAhead && 'slot' in into && this.#incoming.length === 1 &&
      this.#placesOf(this.#started) === undefined
    ) await this.#receive()?.begun.catch(() => {})
    await incoming.arrive()
    this.#remove(incoming)
    this.#given = end
    if (this.#incoming.length === 0) this.#receive()
    return { begin, length, source: 'slot' in into ? { staged: { group: this.#group.handle, slot: into.slot } } : null }
  }

  /** `isBeside`: the gate is open. */
  async drop (hurry: boolean, isBeside = this.#isBeside): Promise<void> {
    if (this.hasEnded) return
    this.#isRefused = true
    this.#changed()
    const timer = hurry
      ? setTimeout(() => {
        this.#group.abandon(`the announced ${this.#rest} had not arrived when its update was aborted`)
      }, HURRY_MS)
      : undefined
    try {
      await (this.#dropping ??= this.#drop(isBeside))
    } finally {
      clearTimeout(timer)
    }
  }

  /** Ends a stream before anything was received, after its sender got the reply not to send. */
  withdraw (): void {
    if (this.#started > 0) throw new TypeError('a stream that has begun to arrive cannot be withdrawn')
    this.#finish()
  }

  /** Receives and drops the rest. Never throws. */
  async close (): Promise<void> {
    if (this.hasEnded) return
    this.#isRefused = true
    this.#changed()
    if (this.#given === this.#pieces.length || this.#group.failure !== null) return this.#finish()
    await Promise.race([
      this.ended,
      this.#dropSomehow().catch((error: unknown) => {
        this.#group.abandon(`the announced ${this.#rest} could not be received: ${errorMessage(error)}`)
      })
    ])
    this.#finish()
  }

  /** Earlier requests may need the gate, so this one requests the gate only when it is first in the queue. */
  async #dropSomehow (): Promise<void> {
    await this.#turn(false)
    if (this.hasEnded) return
    if (this.#group.needsGate) {
      await this.#group.gate.shut(async () => {
        // An update of a second set may have begun it meanwhile, and need the gate for it.
        if (this.#dropping === undefined) await this.drop(false, false)
      })
      await this.#dropping
    } else await this.drop(false)
  }

  get #isBeside (): boolean {
    return this.#access.beside === true
  }

  /**
   * Waits until every earlier request has arrived or is refused. If `mayDrop` (the gate is shut, or the write runs
   * beside steps), it drops the refused ones.
   */
  async #turn (mayDrop: boolean, isBeside = this.#isBeside): Promise<void> {
    if (!mayDrop || isBeside) return await this.#waitForTurn(mayDrop, isBeside)
    // The gate is shut. Streams ahead that arrive beside steps may need it to connect.
    await this.#group.gate.lend(async () => {
      await this.#waitForTurn(true, false)
    })
  }

  async #waitForTurn (mayDrop: boolean, isBeside: boolean): Promise<void> {
    for (;;) {
      const ahead = this.#group.ahead(this)
      const live = ahead.find(stream => !stream.#isRefused)
      if (live !== undefined) await Promise.race([live.ended, live.#change])
      else if (ahead.length === 0 || (this.#group.needsGate && !mayDrop)) return
      else await ahead[0]!.drop(false, isBeside)
    }
  }

  /** Begins to receive the next piece; undefined after the last one. */
  #receive (isBeside = this.#isBeside): Incoming | undefined {
    if (this.#started === this.#pieces.length) return undefined
    const index = this.#started
    const end = this.#started = this.#runEnd(index)
    const piece = joinPieces(this.#pieces.slice(index, end))
    const nameOf = (part: number): string =>
      this.#names({ ...piece, first: piece.first + part - 1, end: piece.first + part })
    const into = this.#target(index, end)
    const { begun, arrive } = this.#group.receive({
      piece,
      into,
      isBeside,
      of: this.#names(piece),
      at: `piece ${index + 1}${end > index + 1 ? ` to ${end}` : ''} of ${this.#pieces.length}`,
      nameOf
    })
    let arrived: Promise<void> | undefined
    const incoming = {
      piece,
      end,
      into,
      begun,
      arrive: async () => {
        await (arrived ??= arrive())
      }
    }
    this.#incoming.push(incoming)
    return incoming
  }

  async #drop (isBeside: boolean): Promise<void> {
    const isLate = this.#group.failure !== null
    const count = this.#pieces.length - this.#given
    try {
      await this.#turn(true, isBeside)
      await this.#group.ready()
      for (;;) {
        const incoming = this.#incoming[0] ?? this.#receive(isBeside)
        if (incoming === undefined) break
        await incoming.arrive()
        this.#remove(incoming)
        this.#group.counts.bytesDropped += bytesIn(incoming.piece)
      }
      if (count > 0) this.dropped = 'The announced broadcasts were received and dropped, and the group stays in step'
    } catch (error) {
      // Wait for running receives: they may still write into the weights.
      await Promise.allSettled(this.#incoming.map(async incoming => {
        await incoming.arrive()
      }))
      // If the group had failed before, the request already reports that failure.
      if (!isLate) {
        this.dropped = `The announced broadcasts could not be received and dropped, so the group was aborted (${
          errorMessage(error)
        }); initialise it again`
      }
    } finally {
      this.#finish()
    }
  }

  /** Removes a piece that has arrived. `next` and `drop` may both await it, so the second call finds it gone. */
  #remove (incoming: Incoming): void {
    if (this.#incoming[0] === incoming) this.#incoming.shift()
  }

  /** The end of the run of neighbouring pieces that need no slot and are received together. */
  #runEnd (index: number): number {
    let end = index + 1
    if (this.#placesOf(index) === undefined) return end
    const { begin } = this.#pieces[index]!
    const belongs = ({ begin: at, length }: Piece): boolean =>
      at + length - begin <= this.#runBytes && this.#placesOf(end) !== undefined
    while (end < this.#pieces.length && belongs(this.#pieces[end]!)) end++
    return end
  }

  #target (index: number, end: number): Target {
    if (this.#placesOf(index) !== undefined) {
      const places = Float64Array.from(this.#places.slice(index, end).flatMap(own => [...own!]))
      return {
        places,
        set: this.#access.set ?? 0,
        began: () => {
          this.#touched = true
        }
      }
    }
    const room = { bytes: 0, slots: 0 }
    for (const [other, { length }] of this.#pieces.entries()) {
      if (this.#placesOf(other) !== undefined) continue
      room.bytes = Math.max(room.bytes, length)
      room.slots = Math.max(room.slots, slotOf(other) + 1)
    }
    return { slot: slotOf(index), room }
  }

  /** A refused request never writes into the weights. */
  #placesOf (index: number): Float64Array | undefined {
    return this.#isRefused ? undefined : this.#places[index]
  }

  get #rest (): string {
    return this.#names(this.#pieces[Math.min(this.#given, this.#pieces.length - 1)]!)
  }

  #finish (): void {
    if (this.hasEnded) return
    this.hasEnded = true
    this.#group.left(this)
    this.#end()
  }
}
