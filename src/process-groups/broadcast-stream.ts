import type { StreamPiece, WeightStream } from '../contract/weight-stream.ts'
import type { WriteJob } from '../native/write-job.ts'
import type { Reception, Target, WeightGroup } from './weight-group.ts'
import { joinPieces, slotOf } from './pieces.ts'
import type { Piece } from './pieces.ts'
import { errorMessage } from '../errors.ts'

/** What a sender that is not wanted any more may take to send the rest. */
const HURRY_MS = 5000

/** `end`: index of the piece behind it. */
interface Incoming extends Reception {
  piece: Piece
  end: number
  into: Target
}

/**
 * The broadcasts that one request has announced, as a stream of pieces: the next one is received while the one before is written, and what
 * comes behind it is asked for as soon as there is a slot for it. They
 * come whether or not they are wanted, and in the order of the requests: what is not taken is received and dropped by `close`. What is known
 * to go straight into the weights, and is wanted, is received there, many pieces in one go, and else into a slot.
 */
export class BroadcastStream implements WeightStream {
  readonly #group: WeightGroup
  readonly #pieces: readonly Piece[]
  /** The tensors of a piece, for messages. */
  readonly #names: (piece: Piece) => string
  readonly #runBytes: number
  /** Of each piece where in the weights it goes; undefined where it is staged. */
  #places: ReadonlyArray<Float64Array | undefined> = []
  #started = 0
  #touched = false
  /** In order; at most two, of which the second goes into a slot. */
  readonly #incoming: Incoming[] = []
  #given = 0
  #isRefused = false
  #dropping: Promise<void> | undefined
  #changed: () => void = () => {}
  #change = new Promise<void>(resolve => {
    this.#changed = resolve
  })
  #end: () => void = () => {}
  /** Resolves once all has come, or nothing more will. */
  readonly ended = new Promise<void>(resolve => {
    this.#end = resolve
  })
  hasEnded = false
  /** What became of the bytes that nobody took, in a sentence; undefined where there were none. */
  dropped: string | undefined

  /** `runBytes`: most that is received straight into the weights in one go; between two, the card waits for this process. */
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
    // Where receiving needs no gate, nothing stands still for a sender that never comes.
    if (!this.#group.needsGate) await this.#receive()?.arrive()
  }

  prepare (job: WriteJob): void {
    // Where receiving needs no gate, the first piece has come by now.
    if (this.#started === 0 && this.#pieces.length > 0) this.#places = this.#group.places(this.#pieces, job)
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
    // Into the slot of the piece before this one: it has been written.
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

  async drop (hurry: boolean): Promise<void> {
    if (this.hasEnded) return
    this.#isRefused = true
    this.#changed()
    const timer = hurry
      ? setTimeout(() => {
        this.#group.abandon(`what was announced of ${this.#rest} had not come when its update was given up`)
      }, HURRY_MS)
      : undefined
    try {
      await (this.#dropping ??= this.#drop())
    } finally {
      clearTimeout(timer)
    }
  }

  /** The sender has been told not to send, and nothing has been received: nothing comes. */
  withdraw (): void {
    if (this.#started > 0) throw new TypeError('what has begun to come cannot be withdrawn')
    this.#finish()
  }

  /** Nobody takes any more. Never throws. */
  async close (): Promise<void> {
    if (this.hasEnded) return
    this.#isRefused = true
    this.#changed()
    if (this.#given === this.#pieces.length || this.#group.failure !== null) return this.#finish()
    await Promise.race([
      this.ended,
      this.#dropSomehow().catch((error: unknown) => {
        this.#group.abandon(`what was announced of ${this.#rest} could not be received: ${errorMessage(error)}`)
      })
    ])
    this.#finish()
  }

  /** Whoever is before may need the gate: it is asked for when nobody is. */
  async #dropSomehow (): Promise<void> {
    await this.#turn(false)
    if (this.hasEnded) return
    if (this.#group.needsGate) {
      await this.#group.runBetweenSteps(async () => {
        await this.drop(false)
      })
    } else await this.drop(false)
  }

  /** Waits until all that was announced before has come or is refused; what is refused is dropped where the gate is shut. */
  async #turn (gateIsShut: boolean): Promise<void> {
    for (;;) {
      const ahead = this.#group.ahead(this)
      const live = ahead.find(receipt => !receipt.#isRefused)
      if (live !== undefined) await Promise.race([live.ended, live.#change])
      else if (ahead.length === 0 || (this.#group.needsGate && !gateIsShut)) return
      else await ahead[0]!.drop(false)
    }
  }

  /** Begins to receive the next piece; undefined behind the last one. */
  #receive (): Incoming | undefined {
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

  async #drop (): Promise<void> {
    const isLate = this.#group.failure !== null
    const count = this.#pieces.length - this.#given
    try {
      await this.#turn(true)
      await this.#group.ready()
      for (;;) {
        const incoming = this.#incoming[0] ?? this.#receive()
        if (incoming === undefined) break
        await incoming.arrive()
        this.#remove(incoming)
        this.#group.counts.bytesDropped += bytesOf(incoming.piece)
      }
      if (count > 0) this.dropped = 'What was announced has been received and dropped, and the group stays in step'
    } catch (error) {
      // Weights that it is coming into are nobody's before it has ended.
      await Promise.allSettled(this.#incoming.map(async incoming => {
        await incoming.arrive()
      }))
      // Where the group had failed before, that is what the request has failed by.
      if (!isLate) {
        this.dropped = `What was announced could not be received and dropped, so that the group was aborted (${
          errorMessage(error)
        }); initialise it again`
      }
    } finally {
      this.#finish()
    }
  }

  /** It has come. Where it is dropped while somebody takes it, both say so. */
  #remove (incoming: Incoming): void {
    if (this.#incoming[0] === incoming) this.#incoming.shift()
  }

  /** Pieces that need no slot are received in one go. */
  #runEnd (index: number): number {
    let end = index + 1
    if (this.#placesOf(index) === undefined) return end
    const { begin } = this.#pieces[index]!
    const isOfRun = ({ begin: at, length }: Piece): boolean =>
      at + length - begin <= this.#runBytes && this.#placesOf(end) !== undefined
    while (end < this.#pieces.length && isOfRun(this.#pieces[end]!)) end++
    return end
  }

  #target (index: number, end: number): Target {
    if (this.#placesOf(index) !== undefined) {
      const places = Float64Array.from(this.#places.slice(index, end).flatMap(own => [...own!]))
      return {
        places,
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

  /** What is refused is no weight's. */
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

export function bytesOf ({ parts }: Piece): number {
  let bytes = 0
  for (let at = 1; at < parts.length; at += 2) bytes += parts[at]!
  return bytes
}
