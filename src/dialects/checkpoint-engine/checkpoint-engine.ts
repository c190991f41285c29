import { setMaxListeners } from 'node:events'
import { RefitError } from '../../errors.ts'
import { labelText } from '../../http/updates/update-fields.ts'
import type { RouteContext } from '../../http/context.ts'
import type { EngineInfo } from '../../contract/rollout-engine.ts'
import { CallJoiner } from '../../weights/call-joiner.ts'
import type { WriteReport } from '../../contract/weight-source.ts'
import { toGpuUuid } from '../../wire/torch/gpus.ts'
import { Peers } from './peers.ts'
import type { Seat } from './peers.ts'
import { runIpcUpdate } from './update.ts'
import { memoize } from '../memoize.ts'
import { socketOf } from './zmq-path.ts'

// checkpoint-engine (https://github.com/MoonshotAI/checkpoint-engine): a parameter server beside the engines, one process for each card. For
// an update it names its ZeroMQ sockets over HTTP and holds that call open; buckets and answers go through the sockets, weights through
// one buffer for each card, which all hold the same.

export interface IpcUpdateFields {
  /** Default true. */
  flush_cache?: boolean
  weight_version?: string | null
  transaction?: string | null
  /** Seconds that all of it may take. */
  timeout?: number | null
}

export interface IpcUpdated {
  message: string
  report: WriteReport
}

/** Longest that the parameter server may send nothing: it broadcasts a bucket meanwhile. */
const SILENCE_MS = 300_000
/** And take to bind its sockets: when it names them, some of its processes have yet to. */
const CONNECT_MS = 60_000
const DEADLINE_MS = 3_600_000

/** What one server's updates share. */
class IpcUpdates {
  readonly joiner = new CallJoiner<IpcUpdated>()
  readonly under = new Set<AbortController>()
  /** Paths of the sockets of exchanges that run. */
  readonly sockets = new Set<string>()
}

const updatesOf = memoize((_context: RouteContext) => new IpcUpdates())

/**
 * Takes an update from a parameter server. `zmqHandles`: by UUID of a card, the endpoint of the socket of the process on that card. The
 * call ends when the exchange does. One equal to a call under way gets that one's outcome.
 */
export async function updateFromIpc (
  context: RouteContext,
  zmqHandles: Readonly<Record<string, string>>,
  fields: IpcUpdateFields = {}
): Promise<IpcUpdated> {
  const seats = chooseSeats(context.engine.info, zmqHandles)
  const { joiner } = updatesOf(context)
  const key = JSON.stringify([
    fields.transaction ?? null,
    seats.map(({ endpoint }) => endpoint),
    fields.weight_version ?? null,
    fields.flush_cache ?? true
  ])
  return await joiner.join(
    key,
    async () => await exchange(context, seats, fields)
  )
}

/** Ends what is under way: the server shuts down. */
export function abortIpcUpdates (context: RouteContext): void {
  for (const control of updatesOf(context).under) {
    control.abort(new RefitError('ENGINE_CLOSED', 'the server is shutting down'))
  }
}

async function exchange (context: RouteContext, seats: readonly Seat[], fields: IpcUpdateFields): Promise<IpcUpdated> {
  const { under, sockets } = updatesOf(context)
  const taken = seats.find(({ path }) => sockets.has(path))
  // The other side hands its messages out in turn to all who are connected.
  if (taken !== undefined) {
    throw new RefitError(
      'CONFLICT',
      `an update with other fields takes what comes through ${taken.endpoint}: wait until it has ended`,
      { param: 'zmq_handles' }
    )
  }
  const deadlineMs = fields.timeout == null ? DEADLINE_MS : fields.timeout * 1000
  const control = new AbortController()
  setMaxListeners(0, control.signal)
  under.add(control)
  for (const { path } of seats) sockets.add(path)
  const timer = setTimeout(() => {
    control.abort(
      new RefitError('DEADLINE', `the exchange with the parameter server has not ended within ${deadlineMs / 1000} s`)
    )
  }, deadlineMs)
  try {
    const options = {
      flushCache: fields.flush_cache ?? true,
      version: fields.weight_version ?? null,
      transaction: fields.transaction ?? null,
      deadlineMs
    }
    const report = await runIpcUpdate(context, seats, options, async () =>
      await Peers.connect(seats, {
        connectMs: Math.min(CONNECT_MS, deadlineMs * 0.9),
        silenceMs: Math.min(SILENCE_MS, deadlineMs),
        signal: control.signal
      })
    )
    return {
      message: `IPC weight update completed successfully${fields.weight_version == null ? '' : '.'}${
        labelText(fields.weight_version, report)
      }`,
      report
    }
  } finally {
    clearTimeout(timer)
    under.delete(control)
    for (const { path } of seats) sockets.delete(path)
  }
}

/**
 * Which sockets this engine answers: one for each of its ranks, where they are named by number; else one for each of its cards, each read by the ranks on that card. Others are other engines'. An engine
 * without cards answers a single one for all ranks, or as many as it has ranks, in their order.
 */
export function chooseSeats (
  { gpus, ranks }: Pick<EngineInfo, 'gpus' | 'ranks'>,
  zmqHandles: Readonly<Record<string, string>>
): Seat[] {
  const entries = Object.entries(zmqHandles)
  // verl's workers have the numbers of the engine's ranks.
  if (entries.length === ranks && entries.every(([key], index) => key === String(index))) {
    return entries.map(([, endpoint], rank) => ({
      card: gpus[rank]?.uuid ?? null,
      endpoint,
      path: socketOf(endpoint),
      ranks: [rank]
    }))
  }
  if (gpus.length === 0) return seatsWithoutGpus(entries, ranks)
  const byGpu = new Map(entries.map(([key, endpoint]) => [toGpuUuid(key) ?? key, endpoint]))
  const seats = new Map<string, Seat>()
  for (const [rank, { uuid }] of gpus.entries()) {
    const gpu = toGpuUuid(uuid) ?? uuid
    const seat = seats.get(gpu)
    if (seat !== undefined) {
      seat.ranks.push(rank)
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
    seats.set(gpu, { card: uuid, endpoint, path: socketOf(endpoint), ranks: [rank] })
  }
  return [...seats.values()]
}

function seatsWithoutGpus (entries: ReadonlyArray<[string, string]>, ranks: number): Seat[] {
  const all = Array.from({ length: ranks }, (_, rank) => rank)
  if (entries.length === 1 || entries.length === ranks) {
    return entries.map(([, endpoint], index) => ({
      card: null,
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
