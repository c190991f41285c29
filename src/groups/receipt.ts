import type { StreamPiece, WeightStream } from '../weights/stream.ts'
import type { WeightGroup } from './weight-group.ts'
import { slotOf } from './pieces.ts'
import type { Piece } from './pieces.ts'

/** What a sender that is not wanted any more may take to send the rest. */
const HURRY_MS = 5000

interface Incoming { index: number, arrived: Promise<void> }

/**
 * The broadcasts that one request has announced, as a stream of pieces: the next one is received while the one before is written. They
 * come whether or not they are wanted, and in the order of the requests: what is not taken is received and dropped by `close`.
 */
export class Receipt implements WeightStream {
  readonly #group: WeightGroup
  readonly #pieces: readonly Piece[]
  /** The tensors of a piece, for messages. */
  readonly #names: (piece: Piece) => string
  #started = 0
  #incoming: Incoming | undefined
  #given = 0
  #isRefused = false
  #dropping: Promise<void> | undefined
  #changed: () => void = () => {}
  #change = new Promise<void>(resolve => { this.#changed = resolve })
  #end: () => void = () => {}
  /** Resolves once all has come, or nothing more will. */
  readonly ended = new Promise<void>(resolve => { this.#end = resolve })
  hasEnded = false
  /** What became of the bytes that nobody took, in a sentence; undefined where there were none. */
  dropped: string | undefined

  constructor (group: WeightGroup, pieces: readonly Piece[], names: (piece: Piece) => string) {
    this.#group = group
    this.#pieces = pieces
    this.#names = names
  }

  async ready (): Promise<void> {
    if (this.#pieces.length === 0) return
    await this.#turn(false)
    await this.#group.ready()
    // Where receiving needs no gate, nothing stands still for a sender that never comes.
    if (!this.#group.needsGate) await this.#receive()?.arrived
  }

  async next (): Promise<StreamPiece | undefined> {
    if (this.#started === 0 && this.#pieces.length > 0) {
      await this.#turn(true)
      await this.#group.ready()
    }
    const incoming = this.#incoming ?? this.#receive()
    if (incoming === undefined) {
      this.#finish()
      return undefined
    }
    await incoming.arrived
    const { begin, length } = this.#pieces[incoming.index]!
    this.#incoming = undefined
    this.#given = incoming.index + 1
    // Into the slot of the piece before the one that is given out: it has been written.
    this.#receive()
    return { begin, length, source: { staged: { group: this.#group.handle, slot: slotOf(incoming.index) } } }
  }

  async drop (hurry: boolean): Promise<void> {
    if (this.hasEnded) return
    this.#isRefused = true
    this.#changed()
    const timer = hurry ? setTimeout(() => { this.#group.giveUp(`what was announced of ${this.#rest} had not come when its update was given up`) }, HURRY_MS) : undefined
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
    await Promise.race([this.ended, this.#dropSomehow().catch((error: unknown) => {
      this.#group.giveUp(`what was announced of ${this.#rest} could not be received: ${error instanceof Error ? error.message : String(error)}`)
    })])
    this.#finish()
  }

  /** Whoever is before may need the gate: it is asked for when nobody is. */
  async #dropSomehow (): Promise<void> {
    await this.#turn(false)
    if (this.hasEnded) return
    if (this.#group.needsGate) await this.#group.standStill(async () => { await this.drop(false) })
    else await this.drop(false)
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
    const index = this.#started++
    const piece = this.#pieces[index]!
    const nameOf = (part: number): string => this.#names({ ...piece, first: piece.first + part - 1, end: piece.first + part })
    const arrived = this.#group.receive({ slot: slotOf(index), piece, room: this.#room, of: this.#names(piece), at: `piece ${index + 1} of ${this.#pieces.length}`, nameOf })
    // It is waited for later, if at all.
    arrived.catch(() => {})
    this.#incoming = { index, arrived }
    return this.#incoming
  }

  async #drop (): Promise<void> {
    const isLate = this.#group.failure !== null
    const count = this.#pieces.length - this.#given
    try {
      await this.#turn(true)
      await this.#group.ready()
      for (let incoming = this.#incoming ?? this.#receive(); incoming !== undefined; incoming = this.#receive()) {
        await incoming.arrived
        this.#group.counts.bytesDropped += bytesOf(this.#pieces[incoming.index]!)
      }
      if (count > 0) this.dropped = 'What was announced has been received and dropped, and the group stays in step'
    } catch (error) {
      // Where the group had failed before, that is what the request has failed by.
      if (!isLate) this.dropped = `What was announced could not be received and dropped, so that the group was aborted (${error instanceof Error ? error.message : String(error)}); initialise it again`
    } finally {
      this.#finish()
    }
  }

  get #room (): { bytes: number, slots: number } { return { bytes: this.#pieces.reduce((most, { length }) => Math.max(most, length), 0), slots: Math.min(this.#pieces.length, 2) } }

  get #rest (): string { return this.#names(this.#pieces[Math.min(this.#given, this.#pieces.length - 1)]!) }

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
