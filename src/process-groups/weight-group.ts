import { setTimeout as sleep } from 'node:timers/promises'
import { RefitError } from '../errors.ts'
import type { WriteJob } from '../native/write-job.ts'
import type { StoreClient } from '../rendezvous/client.ts'
import { UNIQUE_ID_FORMS } from '../rendezvous/unique-id-forms.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import { describeGroup, groupError, namePart } from './group-messages.ts'
import type { GroupSpec } from './group-spec.ts'
import { DirectPlaces } from './direct-places.ts'
import type { Places } from './direct-places.ts'
import { LentGate } from './lent-gate.ts'
import type { GroupLink } from './link.ts'
import { BroadcastStream } from './broadcast-stream.ts'
import { bytesIn } from './pieces.ts'
import type { Piece } from './pieces.ts'
import { grown } from './reception.ts'
import type { ReceiveRequest, Reception, Room } from './reception.ts'
import { StoreWatch } from './store-watch.ts'
import { timeToMeet } from './time-to-meet.ts'
import type { GroupCounts, GroupStore, WeightGroupOptions } from './weight-group-options.ts'

export type GroupState = 'joining' | 'joined' | 'connected' | 'failed' | 'ended'

/**
 * A trainer that has sent everything may leave before we have received it, so a running receive continues for this
 * long.
 */
const STORE_GRACE_MS = 5000
const GATE_MS = 30 * 60_000
/** How long running receives take at most to see an abort. */
const ABORT_MS = 1000

/**
 * One process group that our ranks are in. After a failure its native part ends by itself, and a new group may use its
 * name at once.
 */
export class WeightGroup {
  readonly spec: GroupSpec
  readonly counts: GroupCounts
  /** For messages. */
  readonly title: string
  readonly gate: LentGate
  readonly #options: WeightGroupOptions
  readonly #control = new AbortController()
  /** Requests whose broadcasts have not all arrived, in the order of arrival. */
  readonly #streams: BroadcastStream[] = []
  #state: GroupState = 'joining'
  #failure: RefitError | null = null
  #link: GroupLink | undefined
  #store: GroupStore | undefined
  #watch: StoreWatch | undefined
  #meeting: Promise<void> | undefined
  readonly #places = new DirectPlaces()
  /** The running receives. */
  readonly #receives = new Set<Promise<void>>()
  /** The running phases, the oldest first. */
  readonly #phases: Array<{ what: string, deadline: Deadline }> = []
  #staged = { bytes: 0, slots: 0 }
  /** The begin of the latest receive: receives begin in order. */
  #begun: Promise<void> = Promise.resolve()
  #ending: Promise<void> = Promise.resolve()

  constructor (options: WeightGroupOptions) {
    this.#options = options
    this.spec = options.spec
    this.counts = options.counts
    this.title = describeGroup(options.spec, options.host.ranks)
    this.gate = new LentGate(async run => await options.host.runBetweenSteps(run, options.timeoutMs))
  }

  get state (): GroupState {
    return this.#state
  }
  get failure (): RefitError | null {
    return this.#failure
  }
  /** Why it cannot be used any more; null if it can. */
  get trouble (): string | null {
    if (this.#failure !== null) return this.#failure.message
    return this.#watch?.lost === true ? `the connection to the trainer's store has ended: ${this.#watch.reason}` : null
  }

  /** True if it cannot be used any more, because it failed or the trainer's store is gone. */
  get isDead (): boolean {
    return this.trouble !== null
  }
  get needsGate (): boolean {
    return this.#link!.needsGate
  }
  /** The store of its rendezvous; defined once it has joined. */
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
  /** True if a receive may begin before the previous one has ended. Otherwise its deadline would run while it waits. */
  get isAhead (): boolean {
    return this.#link!.isAhead
  }
  /** Resolves once its native part is gone. */
  get gone (): Promise<void> {
    return this.#ending
  }

  /**
   * Resolves once the store has counted our ranks; the rest continues in the background. If the form makes its
   * communicator at once, resolves when the communicator is made. If our ranks are the last to come and gloo connects,
   * waits a moment for that, and for the refusal if the other ranks are in a group of another name.
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
    // A store of our own does not show that a trainer has gone.
    if (!this.spec.hosts) {
      this.#watch = new StoreWatch(this.#store!.client, () => {
        this.#storeLost()
      })
    }
    if (!this.#link!.isEager && !this.spec.barrier) return
    const connecting = this.#connectEarly(timeoutMs)
    if (UNIQUE_ID_FORMS[this.spec.form].atOnce) return await connecting
    connecting.catch(() => {})
    if (this.spec.backend === 'gloo' && !this.spec.hosts) {
      await Promise.race([connecting, timeToMeet(this.store, this.spec, this.#control.signal)])
    }
  }

  /**
   * The broadcasts that a request announces. They arrive after all that were announced before. `runBytes`: see
   * BroadcastStream.
   */
  announce (pieces: readonly Piece[], names: (piece: Piece) => string, runBytes = 0): BroadcastStream {
    this.requireLive()
    const stream = new BroadcastStream(this, pieces, names, runBytes)
    if (pieces.length > 0) this.#streams.push(stream)
    return stream
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

  /** Earlier requests whose broadcasts have not all arrived. */
  ahead (stream: BroadcastStream): BroadcastStream[] {
    return this.#streams.slice(0, Math.max(0, this.#streams.indexOf(stream)))
  }

  left (stream: BroadcastStream): void {
    const at = this.#streams.indexOf(stream)
    if (at >= 0) this.#streams.splice(at, 1)
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

  /** The places in the weights that pieces of a write can be received into; empty if all must be staged. */
  places (pieces: readonly Piece[], job: WriteJob, set: number): Places {
    const link = this.#link!
    if (this.#options.staged || link.places === undefined) return []
    return this.#places.of(pieces, job, (parts, job) => link.places!(parts, job, set))
  }

  /**
   * Begins to receive a piece; the gate must be shut if `needsGate`, unless `isBeside`. If `isAhead`, a second piece
   * may begin into the other slot before the first has arrived.
   */
  receive ({ piece, messages, into, isBeside = false, of, at, nameOf }: ReceiveRequest): Reception {
    const { native } = this.#options.host
    const isAhead = 'slot' in into && this.isAhead
    const receiving = async (call: (timeoutMs: number) => Promise<void>): Promise<void> => {
      const receive = this.#phase(`receiving ${of} (${at})`, async deadline => {
        await call(deadline.timeoutMs).catch((error: unknown) => {
          throw namePart(error, nameOf)
        })
      })
      this.#receives.add(receive)
      await receive.finally(() => this.#receives.delete(receive))
    }
    const begin = async (timeoutMs: number): Promise<void> => {
      const { root } = this.spec
      if ('slot' in into) {
        if (messages !== undefined) {
          const coming = isAhead
            ? native.groupBeginMessages(this.handle, into.slot, messages, timeoutMs, into.set)
            : native.groupReceiveMessages(this.handle, into.slot, messages, timeoutMs)
          into.began?.()
          return await coming
        }
        return await (isAhead ? native.groupBegin : native.groupReceive)(
          this.handle,
          into.slot,
          piece.parts,
          root,
          timeoutMs
        )
      }
      const coming = native.groupReceiveInPlace(this.handle, into.places, root, timeoutMs, into.set)
      into.began()
      await coming
    }
    const before = this.#begun
    const begun = this.#begun = (async () => {
      await before.catch(() => {})
      await this.#settleIn('slot' in into ? into.room : { bytes: 0, slots: 0 }, isBeside)
      await receiving(begin)
    })()
    // The caller may never await it, and a rejection must not end the process.
    begun.catch(() => {})
    const arrive = async (): Promise<void> => {
      await begun
      if (isAhead) {
        await receiving(async timeoutMs => {
          await native.groupArrive(this.handle, timeoutMs)
        })
      }
      this.counts.bytesReceived += bytesIn(piece)
    }
    return { begun, arrive }
  }

  /** Connects, and allocates staging buffers. Both may wait for a GPU that no step may use meanwhile. */
  async #settleIn (room: Room, isBeside: boolean): Promise<void> {
    const wanted = grown(this.#staged, room)
    const run = async (): Promise<void> => {
      await this.#connect()
      if (wanted !== null) await this.#stage(wanted)
    }
    if (!isBeside || !this.needsGate || (this.#link!.isConnected && wanted === null)) return await run()
    // A phase: without the gate the group is out of step with its sender, as after any failed receive.
    await this.#phase('stopping generation to connect', async () => await this.gate.use(run))
  }

  async #stage (room: Room): Promise<void> {
    const { bytes, slots } = room
    await this.#phase(`allocating ${slots} staging buffers of ${bytes} bytes`, async () => {
      await this.#options.host.native.stageGroup(this.handle, bytes, slots)
    })
    this.#staged = room
  }

  /** The received bytes of a slot, from our first rank's memory. */
  async read (slot: 0 | 1, bytes: number): Promise<Uint8Array> {
    let read: Uint8Array = new Uint8Array()
    await this.#phase('reading what was received', async deadline => {
      read = await this.#options.host.native.groupRead(this.handle, slot, 0, bytes, deadline.timeoutMs)
    })
    return read
  }

  /** Aborts a group that cannot stay in step. */
  abandon (reason: string): RefitError {
    const [running] = this.#phases
    const phase = running === undefined
      ? ''
      : `, ${running.what}, after ${(running.deadline.elapsed / 1000).toFixed(1)} s`
    return this.#fail(new RefitError('GROUP_BROKEN', `${this.title} was aborted${phase}: ${reason}`))
  }

  /**
   * Ends the group because a request asks for it, and waits for the end. A rank that sees the group fail may ask before
   * the failure has reached this thread: a receive that has failed by then gives the reason.
   */
  async leave (reason: string): Promise<void> {
    if (this.#receives.size > 0 && !this.#isOver) {
      this.#options.host.native.groupAbort(this.handle, reason)
      await Promise.race([Promise.allSettled(this.#receives), sleep(ABORT_MS, undefined, { ref: false })])
    }
    this.end(reason)
    await this.gone
  }

  /** Leaves the group: with a normal end if nothing is running, else by an abort. Does not wait; see `gone`. */
  end (reason: string): void {
    if (this.#isOver) return
    if (this.#streams.length > 0 || this.#state === 'joining') {
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

  /** Connects before the first broadcast, and meets in the barrier if the spec has one. */
  async #connectEarly (timeoutMs: number): Promise<void> {
    const { host } = this.#options
    const gated = async (run: () => Promise<void>): Promise<void> =>
      this.needsGate ? await host.runBetweenSteps(run, timeoutMs) : await run()
    try {
      await this.ready()
      await gated(async () => {
        await this.#connect()
        if (!this.spec.barrier) return
        await this.#phase('the barrier', async deadline => {
          await host.native.groupBarrier(this.handle, deadline.timeoutMs)
        })
      })
    } catch (error) {
      throw this.#fail(groupError(this.title, 'stopping generation', timeoutMs, error))
    }
  }

  /** Runs a step with a deadline of its own. If the step fails, the group fails. */
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
      if (this.#streams.length + this.#phases.length > 0 || this.#state !== 'connected') {
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
    // An engine that has ended has no gate, and runs no steps.
    this.#ending = (this.needsGate ? host.runBetweenSteps(end, GATE_MS).catch(end) : end()).catch(() => {})
  }
}
