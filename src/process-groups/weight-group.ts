import type { GroupHost } from '../contract/group-host.ts'
import { RefitError } from '../errors.ts'
import type { WriteJob } from '../native/write-job.ts'
import { PART_FIELDS } from '../native/groups.ts'
import type { StoreClient } from '../rendezvous/client.ts'
import { UNIQUE_ID_FORMS } from '../rendezvous/unique-id-forms.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import { describeGroup, groupError, namePart } from './group-messages.ts'
import type { GroupSpec } from './group-spec.ts'
import type { GroupLink } from './link.ts'
import { bytesOf, BroadcastStream } from './broadcast-stream.ts'
import { joinPieces } from './pieces.ts'
import type { Piece } from './pieces.ts'
import { StoreWatch } from './store-watch.ts'

export type GroupState = 'joining' | 'joined' | 'connected' | 'failed' | 'ended'

/** What groups have done since the start. */
export interface GroupCounts {
  joined: number
  failed: number
  bytesReceived: number
  bytesDropped: number
}

/** A connection with the rendezvous; `close` ends the store too where it is ours. */
export interface GroupStore {
  client: StoreClient
  close: () => void
}

export interface WeightGroupOptions {
  spec: GroupSpec
  host: GroupHost
  counts: GroupCounts
  /** Longest that each phase may take. */
  timeoutMs: number
  /** Nothing is received straight into the weights. */
  staged: boolean
  /** Comes to the rendezvous, or hosts it, and has our ranks counted. */
  openStore: (deadline: Deadline) => Promise<GroupStore>
  /** Before the store is asked where the backend knows by then whether it can be, else once the store is there. */
  early: () => GroupLink | undefined
  late: (store: StoreClient) => Promise<GroupLink>
}

/** Where a piece is received: into a slot, of which there is to be so much room, or into the weights (`WeightGroup.places`), which change from when it has begun. */
export type Target = { slot: 0 | 1, room: { bytes: number, slots: number } } | {
  places: Float64Array
  began: () => void
}

/** `of`, `at` and `nameOf`, of the piece's broadcasts counted from 1, are for messages. */
interface ReceiveRequest {
  piece: Piece
  into: Target
  of: string
  at: string
  nameOf: (part: number) => string
}

/** A piece on its way. `begun`: the cards have been told, or it has come. `arrive`: waits for it, once. */
export interface Reception {
  begun: Promise<void>
  arrive: () => Promise<void>
}

/** Bytes that slots grow by. */
const GRAIN = 1 << 20
/** Of a slot that is only made twice for requests of several pieces: a bucket as large as the model does not take its room twice. */
const ALONE = 1 << 30
/** What is under way may still end well when the store's server has gone: a trainer that has sent all may leave before we have taken it. */
const STORE_GRACE_MS = 5000
const GATE_MS = 30 * 60_000

/** One process group that our ranks are in. After a failure its native part ends by itself; a new one of the same name may be made at once. */
export class WeightGroup {
  readonly spec: GroupSpec
  readonly counts: GroupCounts
  /** In words. */
  readonly title: string
  readonly #options: WeightGroupOptions
  readonly #control = new AbortController()
  /** Requests whose broadcasts have not all come, in the order in which they do. */
  readonly #receipts: BroadcastStream[] = []
  #state: GroupState = 'joining'
  #failure: RefitError | null = null
  #link: GroupLink | undefined
  #store: GroupStore | undefined
  #watch: StoreWatch | undefined
  #meeting: Promise<void> | undefined
  /** Of plans that are taken again at every step; what makes a plan is its rectangles. */
  readonly #places = new WeakMap<
    Float64Array,
    { parts: Float64Array, tensors: Float64Array, places: Array<Float64Array | undefined> }
  >()
  /** The phases that are under way, the oldest first. */
  readonly #phases: Array<{ what: string, deadline: Deadline }> = []
  #staged = { bytes: 0, slots: 0 }
  /** The last piece that was begun to be received. */
  #begun: Promise<void> = Promise.resolve()
  #ending: Promise<void> = Promise.resolve()

  constructor (options: WeightGroupOptions) {
    this.#options = options
    this.spec = options.spec
    this.counts = options.counts
    this.title = describeGroup(options.spec, options.host.ranks)
  }

  get state (): GroupState {
    return this.#state
  }
  get failure (): RefitError | null {
    return this.#failure
  }
  /** Why it is dead, in words; null where it is not. */
  get trouble (): string | null {
    if (this.#failure !== null) return this.#failure.message
    return this.#watch?.lost === true ? `the connection to the trainer's store has ended: ${this.#watch.reason}` : null
  }

  /** Of no use any more; also where the trainer's store has gone. */
  get isDead (): boolean {
    return this.trouble !== null
  }
  get needsGate (): boolean {
    return this.#link!.needsGate
  }
  /** The store of its rendezvous, once it has joined. */
  get store (): StoreClient {
    return this.#store!.client
  }
  get timeoutMs (): number {
    return this.#options.timeoutMs
  }
  get handle (): number {
    return this.#link!.handle
  }
  get pieceBytes (): number {
    return this.#link!.pieceBytes
  }
  /** A piece may be begun before the one before it has come; else its time would run meanwhile. */
  get isAhead (): boolean {
    return this.#link!.isAhead
  }
  /** Resolves once nothing of it is left. */
  get gone (): Promise<void> {
    return this.#ending
  }

  /**
   * Resolves once the store has counted our ranks, and what comes later goes on by itself; of a form whose communicator is made at once,
   * when it stands.
   */
  async join (): Promise<void> {
    const { early, late, openStore, timeoutMs } = this.#options
    await this.#phase('joining the rendezvous', async deadline => {
      this.#link = early()
      this.#store = await openStore(deadline)
      if (this.#isOver) return this.#store.close()
      if (this.#link !== undefined) return
      const link = await late(this.#store.client)
      if (this.#isOver) await this.#options.host.native.endGroup(link.handle, true)
      else this.#link = link
    })
    this.#state = 'joined'
    this.counts.joined++
    // With a store of our own no trainer goes.
    if (!this.spec.hosts) {
      this.#watch = new StoreWatch(this.#store!.client, () => {
        this.#storeLost()
      })
    }
    if (!this.#link!.isEager && !this.spec.barrier) return
    const standing = this.#stand(timeoutMs)
    if (UNIQUE_ID_FORMS[this.spec.form].atOnce) await standing
    else standing.catch(() => {})
  }

  /** What a request announces: it comes after all that was announced before. `runBytes`: see BroadcastStream. */
  announce (pieces: readonly Piece[], names: (piece: Piece) => string, runBytes = 0): BroadcastStream {
    this.requireLive()
    const receipt = new BroadcastStream(this, pieces, names, runBytes)
    if (pieces.length > 0) this.#receipts.push(receipt)
    return receipt
  }

  requireLive (): void {
    if (this.#failure === null) {
      if (this.#state === 'joining') {
        throw new RefitError('CONFLICT', `${this.title} is still being joined. Nothing was received`)
      }
      return
    }
    const way = this.spec.form === 'custom' ? 'call /init_weights_update_group' : 'initialise it'
    throw new RefitError(
      this.#failure.code,
      `${this.#failure.message}. Nothing has been received since; ${way} again`,
      { cause: this.#failure }
    )
  }

  /** Requests before it whose broadcasts have not all come. */
  ahead (receipt: BroadcastStream): BroadcastStream[] {
    return this.#receipts.slice(0, Math.max(0, this.#receipts.indexOf(receipt)))
  }

  left (receipt: BroadcastStream): void {
    const at = this.#receipts.indexOf(receipt)
    if (at >= 0) this.#receipts.splice(at, 1)
  }

  /** Resolves once bytes can flow. */
  async ready (): Promise<void> {
    this.requireLive()
    await (this.#meeting ??= this.#phase(
      this.spec.backend === 'gloo' ? 'connecting with the other ranks' : "waiting for the id of rank 0's communicator",
      async deadline => {
        await this.#link!.meet(this.#store!.client, deadline)
      }
    ))
  }

  /** Of each piece of a write where in the weights its broadcasts go, as `parts`; undefined where they have to be staged. */
  places (pieces: readonly Piece[], job: WriteJob): Array<Float64Array | undefined> {
    const link = this.#link!
    if (this.#options.staged || link.places === undefined) return []
    const { parts } = joinPieces(pieces)
    const known = this.#places.get(job.rects)
    if (known !== undefined && areEqual(known.parts, parts) && areEqual(known.tensors, job.tensors)) return known.places
    const found = link.places(parts, job)
    let next = 0
    const places = pieces.map(({ parts }) => {
      const own = Float64Array.from(parts, (value, at) => at % PART_FIELDS === 0 ? found[next++]! : value)
      return own.every((value, at) => at % PART_FIELDS !== 0 || value >= 0) ? own : undefined
    })
    this.#places.set(job.rects, { parts, tensors: job.tensors, places })
    return places
  }

  /**
   * Begins to receive a piece, gate shut where that is needed. Where `isAhead`, a second one into the other slot may be begun before the first
   * has come.
   */
  receive ({ piece, into, of, at, nameOf }: ReceiveRequest): Reception {
    const { native } = this.#options.host
    const isAhead = 'slot' in into && this.isAhead
    const receiving = async (call: (timeoutMs: number) => Promise<void>): Promise<void> => {
      await this.#phase(`receiving ${of} (${at})`, async deadline => {
        await call(deadline.timeoutMs).catch((error: unknown) => {
          throw namePart(error, nameOf)
        })
      })
    }
    const begin = async (timeoutMs: number): Promise<void> => {
      const { root } = this.spec
      if ('slot' in into) {
        return await (isAhead ? native.groupBegin : native.groupReceive)(
          this.handle,
          into.slot,
          piece.parts,
          root,
          timeoutMs
        )
      }
      const coming = native.groupReceiveInPlace(this.handle, into.places, root, timeoutMs)
      into.began()
      await coming
    }
    const before = this.#begun
    const begun = this.#begun = (async () => {
      await before.catch(() => {})
      await this.#connect()
      if ('slot' in into) await this.#makeRoom(into.room)
      await receiving(begin)
    })()
    // It is waited for later, if at all.
    begun.catch(() => {})
    const arrive = async (): Promise<void> => {
      await begun
      if (isAhead) {
        await receiving(async timeoutMs => {
          await native.groupArrive(this.handle, timeoutMs)
        })
      }
      this.counts.bytesReceived += bytesOf(piece)
    }
    return { begun, arrive }
  }

  async #makeRoom (room: { bytes: number, slots: number }): Promise<void> {
    const { native } = this.#options.host
    if (room.bytes > this.#staged.bytes || room.slots > this.#staged.slots) {
      const kept = this.#staged.bytes > ALONE ? 0 : this.#staged.bytes
      // None at all would be no slot, for broadcasts without bytes.
      const bytes = Math.max(kept, Math.ceil(room.bytes / GRAIN) * GRAIN, GRAIN)
      const slots = bytes > ALONE ? room.slots : 2
      await this.#phase(`finding room for ${slots} times ${bytes} bytes`, async () => {
        await native.stageGroup(this.handle, bytes, slots)
      })
      this.#staged = { bytes, slots }
    }
  }

  /** Bytes of a slot that have been received, as our first rank has them. */
  async read (slot: 0 | 1, bytes: number): Promise<Uint8Array> {
    let read: Uint8Array = new Uint8Array()
    await this.#phase('reading what was received', async deadline => {
      read = await this.#options.host.native.groupRead(this.handle, slot, 0, bytes, deadline.timeoutMs)
    })
    return read
  }

  /** With the gate shut. */
  async runBetweenSteps (run: () => Promise<void>): Promise<void> {
    await this.#options.host.runBetweenSteps(run, this.#options.timeoutMs)
  }

  /** It cannot stay in step. */
  abandon (reason: string): RefitError {
    const [under] = this.#phases
    const phase = under === undefined ? '' : `, ${under.what}, after ${(under.deadline.elapsed / 1000).toFixed(1)} s`
    return this.#fail(new RefitError('GROUP_BROKEN', `${this.title} was aborted${phase}: ${reason}`))
  }

  /** Leaves, in order where nothing is under way. Resolves at once; see `gone`. */
  end (reason: string): void {
    if (this.#isOver) return
    if (this.#receipts.length > 0 || this.#state === 'joining') {
      this.#fail(new RefitError('GROUP_BROKEN', `${this.title} was ended: ${reason}`), 'ended')
      return
    }
    this.#failure = new RefitError('GROUP_BROKEN', `${this.title} was ended: ${reason}`)
    this.#close('ended', false)
  }

  get #isOver (): boolean {
    return this.#state === 'failed' || this.#state === 'ended'
  }

  async #connect (): Promise<void> {
    this.requireLive()
    if (this.#state === 'connected') return
    await this.#phase('making the communicator', async deadline => {
      await this.#link!.connect(deadline.timeoutMs)
    })
    this.#state = 'connected'
  }

  /** What follows when the group is made. */
  async #stand (timeoutMs: number): Promise<void> {
    const { host } = this.#options
    const stand = async (run: () => Promise<void>): Promise<void> =>
      this.needsGate ? await host.runBetweenSteps(run, timeoutMs) : await run()
    try {
      await this.ready()
      await stand(async () => {
        await this.#connect()
        if (!this.spec.barrier) return
        await this.#phase('the barrier', async deadline => {
          await host.native.groupBarrier(this.handle, deadline.timeoutMs)
        })
      })
    } catch (error) {
      throw this.#fail(groupError(this.title, 'standing still', timeoutMs, error))
    }
  }

  /** A step with a deadline of its own; when it fails, so does the group. */
  async #phase (what: string, run: (deadline: Deadline) => Promise<void>): Promise<void> {
    const { timeoutMs } = this.#options
    const deadline = new Deadline({ timeoutMs, signal: this.#control.signal }, timeoutMs)
    const phase = { what, deadline }
    this.#phases.push(phase)
    try {
      await run(deadline)
    } catch (error) {
      throw this.#fail(groupError(this.title, what, deadline.elapsed, error))
    } finally {
      this.#phases.splice(this.#phases.indexOf(phase), 1)
    }
    if (this.#isOver && this.#failure !== null) throw this.#failure
  }

  #storeLost (): void {
    if (this.#isOver) return
    const lost = (): void => {
      if (this.#receipts.length > 0 || this.#state !== 'connected') {
        this.abandon(`the connection to the trainer's store has ended: ${this.#watch!.reason}`)
      }
    }
    if (this.#state !== 'connected') return lost()
    setTimeout(lost, STORE_GRACE_MS).unref()
  }

  #fail (error: RefitError, state: 'failed' | 'ended' = 'failed'): RefitError {
    if (this.#isOver) return this.#failure!
    this.#failure = error
    this.counts.failed++
    this.#control.abort(error)
    if (this.#link !== undefined) this.#options.host.native.groupAbort(this.handle, error.message)
    this.#close(state, true)
    return error
  }

  #close (state: 'failed' | 'ended', abort: boolean): void {
    this.#state = state
    this.#watch?.close()
    this.#store?.close()
    if (this.#link === undefined) return
    const { host } = this.#options
    const end = async (): Promise<void> => {
      await host.native.endGroup(this.handle, abort)
    }
    // Where the engine has ended there is no gate any more, and nothing that could stand in the way.
    this.#ending = (this.needsGate ? host.runBetweenSteps(end, GATE_MS).catch(end) : end()).catch(() => {})
  }
}

function areEqual (a: Float64Array, b: Float64Array): boolean {
  return Buffer.compare(
    new Uint8Array(a.buffer, a.byteOffset, a.byteLength),
    new Uint8Array(b.buffer, b.byteOffset, b.byteLength)
  ) === 0
}
