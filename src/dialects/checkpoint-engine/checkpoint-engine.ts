import { setMaxListeners } from 'node:events'
import { RefitError } from '../../errors.ts'
import { labelText } from '../../http/updates/update-fields.ts'
import type { UpdatesContext } from '../../http/context.ts'
import type { AdapterReport } from '../../contract/adapters.ts'
import type { EngineInfo } from '../../contract/rollout-engine.ts'
import type { WriteReport } from '../../contract/weight-source.ts'
import { toGpuUuid } from '../../wire/torch/gpus.ts'
import { runIpcAdapter } from './adapter.ts'
import type { IpcAdapter } from './adapter.ts'
import { Peers } from './peers.ts'
import type { Slot } from './peers.ts'
import { runIpcUpdate } from './update.ts'
import { memoize } from '../memoize.ts'
import { socketOf } from './zmq-path.ts'

// checkpoint-engine (https://github.com/MoonshotAI/checkpoint-engine) is a parameter server beside the engines, with
// one process for each GPU. For an update it sends the names of its ZeroMQ sockets over HTTP and keeps that call open.
// Bucket descriptions and replies go through the sockets, weights through one buffer for each GPU; all buffers hold the
// same bytes.

export interface IpcUpdateFields {
  /** Default true. */
  flush_cache?: boolean
  weight_version?: string | null
  transaction?: string | null
  /** Longest time of the whole update, in seconds. */
  timeout?: number | null
}

export interface IpcUpdated {
  message: string
  report: WriteReport
}

/** Longest silence of the parameter server, which broadcasts a bucket meanwhile. */
const SILENCE_MS = 300_000
/** Longest time until it has bound its sockets: some of its processes may not have when it sends their names. */
const CONNECT_MS = 60_000
const DEADLINE_MS = 3_600_000

/** The exchanges of one server that run. */
class Exchanges {
  readonly #running = new Set<AbortController>()
  /** Paths of their sockets. */
  readonly #sockets = new Set<string>()

  /** Takes the sockets until `end`. Throws CONFLICT if another exchange reads from one of them. */
  begin (slots: readonly Slot[], deadlineMs: number): { signal: AbortSignal, end: () => void } {
    const taken = slots.find(({ path }) => this.#sockets.has(path))
    // A REQ socket distributes its messages over its connections, so each of two exchanges would get half of them.
    if (taken !== undefined) {
      throw new RefitError(
        'CONFLICT',
        `an update with other fields already reads from ${taken.endpoint}: wait until it has ended`,
        { param: 'zmq_handles' }
      )
    }
    const control = new AbortController()
    setMaxListeners(0, control.signal)
    this.#running.add(control)
    for (const { path } of slots) this.#sockets.add(path)
    const timer = setTimeout(() => {
      control.abort(
        new RefitError('DEADLINE', `the exchange with the parameter server has not ended within ${deadlineMs / 1000} s`)
      )
    }, deadlineMs)
    return {
      signal: control.signal,
      end: () => {
        clearTimeout(timer)
        this.#running.delete(control)
        for (const { path } of slots) this.#sockets.delete(path)
      }
    }
  }

  /** Aborts all: the server shuts down. */
  abort (): void {
    for (const control of this.#running) {
      control.abort(new RefitError('ENGINE_CLOSED', 'the server is shutting down'))
    }
  }
}

const exchangesOf = memoize((_context: UpdatesContext) => new Exchanges())

/**
 * Runs an update by a parameter server. `zmqHandles`: UUID of a GPU -> endpoint of the socket of the process on that
 * GPU. The call ends when the exchange ends. A call equal to a running one joins it and gets the same outcome.
 */
export async function updateFromIpc (
  context: UpdatesContext,
  zmqHandles: Readonly<Record<string, string>>,
  fields: IpcUpdateFields = {}
): Promise<IpcUpdated> {
  const slots = chooseSlots(context.engine.info, zmqHandles)
  const { flush_cache: flushCache = true, weight_version: version = null, transaction = null, timeout } = fields
  const deadlineMs = toDeadline(timeout)
  const report = await runIpcUpdate(
    context,
    slots,
    { flushCache, version, transaction, deadlineMs },
    linkTo(context, slots, deadlineMs)
  )
  return {
    message: `IPC weight update completed successfully${version === null ? '' : '.'}${labelText(version, report)}`,
    report
  }
}

/**
 * Loads a LoRA adapter that verl's workers send in buckets, as they send weights (docs/trainers/verl.md). `zmqHandles`
 * as for updates; every socket sends the whole adapter.
 */
export async function loadAdapterFromIpc (
  context: UpdatesContext,
  zmqHandles: Readonly<Record<string, string>>,
  adapter: IpcAdapter,
  /** Longest time of the whole load, in seconds. */
  timeout?: number | null
): Promise<AdapterReport> {
  const slots = chooseSlots(context.engine.info, zmqHandles)
  return await runIpcAdapter(context, slots, adapter, linkTo(context, slots, toDeadline(timeout)))
}

function toDeadline (timeout: number | null | undefined): number {
  return timeout == null ? DEADLINE_MS : timeout * 1000
}

/** Connects to the sockets of an exchange, which belong to it from `connect` to `end`. */
function linkTo (
  context: UpdatesContext,
  slots: readonly Slot[],
  deadlineMs: number
): { connect: () => Promise<Peers>, end: () => void } {
  let exchange: ReturnType<Exchanges['begin']> | undefined
  return {
    connect: async () => {
      exchange = exchangesOf(context).begin(slots, deadlineMs)
      return await Peers.connect(slots, {
        connectMs: Math.min(CONNECT_MS, deadlineMs * 0.9),
        silenceMs: Math.min(SILENCE_MS, deadlineMs),
        signal: exchange.signal
      })
    },
    end: () => {
      exchange?.end()
    }
  }
}

/** Aborts all exchanges: the server shuts down. */
export function abortIpcUpdates (context: UpdatesContext): void {
  exchangesOf(context).abort()
}

/**
 * The sockets that this engine replies on: one for each of its ranks if they are named by number, else one for each of
 * its GPUs, which the ranks on that GPU use. Other sockets belong to other engines. An engine without GPUs replies on a
 * single socket for all ranks, or on one for each rank in their order.
 */
export function chooseSlots (
  { gpus, ranks }: Pick<EngineInfo, 'gpus' | 'ranks'>,
  zmqHandles: Readonly<Record<string, string>>
): Slot[] {
  const entries = Object.entries(zmqHandles)
  // verl's workers are numbered like the engine's ranks.
  if (entries.length === ranks && entries.every(([key], index) => key === String(index))) {
    return entries.map(([, endpoint], rank) => ({
      gpu: gpus[rank]?.uuid ?? null,
      endpoint,
      path: socketOf(endpoint),
      ranks: [rank]
    }))
  }
  if (gpus.length === 0) return slotsWithoutGpus(entries, ranks)
  const byGpu = new Map(entries.map(([key, endpoint]) => [toGpuUuid(key) ?? key, endpoint]))
  const slots = new Map<string, Slot>()
  for (const [rank, { uuid }] of gpus.entries()) {
    const gpu = toGpuUuid(uuid) ?? uuid
    const slot = slots.get(gpu)
    if (slot !== undefined) {
      slot.ranks.push(rank)
      continue
    }
    const endpoint = byGpu.get(gpu)
    if (endpoint === undefined) {
      throw refusal(
        `there is no socket for the GPU of rank ${rank}, ${uuid}, among ${
          shown(entries)
        }: the parameter server needs a process on every GPU of this engine`
      )
    }
    slots.set(gpu, { gpu: uuid, endpoint, path: socketOf(endpoint), ranks: [rank] })
  }
  return [...slots.values()]
}

function slotsWithoutGpus (entries: ReadonlyArray<[string, string]>, ranks: number): Slot[] {
  const all = Array.from({ length: ranks }, (_, rank) => rank)
  if (entries.length === 1 || entries.length === ranks) {
    return entries.map(([, endpoint], index) => ({
      gpu: null,
      endpoint,
      path: socketOf(endpoint),
      ranks: entries.length === 1 ? all : [index]
    }))
  }
  throw refusal(
    `this engine has no GPUs, and takes the socket of one process${
      ranks > 1 ? `, or of ${ranks}, in the order of its ranks` : ''
    }; got ${shown(entries)}`
  )
}

function shown (entries: ReadonlyArray<[string, string]>): string {
  if (entries.length === 0) return 'none'
  return entries.slice(0, 16).map(([key]) => key.slice(0, 60)).join(', ')
}

function refusal (message: string): RefitError {
  return new RefitError('INVALID_REQUEST', `zmq_handles: ${message}`, { param: 'zmq_handles' })
}
