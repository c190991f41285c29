import { errorMessage, RefitError } from '../errors.ts'
import { cutCheckpoint, layOutCheckpoint, weightBytes } from '../model/checkpoint-layout.ts'
import { DISTRIBUTED } from '../process-groups/transport.ts'
import { chooseSet } from '../weights/choose-set.ts'
import { overwriteWeights } from '../weights/exclusive-access.ts'
import { swapTimes } from '../weights/sum-reports.ts'
import type { WeightSource, WriteReport } from '../contract/weight-source.ts'
import type { ShadowSet } from '../weights/shadow-set.ts'
import type { WeightStore } from '../weights/weight-store.ts'
import type { OnRunning, SwapMode } from '../contract/weight-update.ts'
import type { WeightStream } from '../contract/weight-stream.ts'
import type { Access } from '../native/addon.ts'
import { allOf } from './all-of.ts'
import { ParameterStream } from './parameter-stream.ts'
import { PieceStream } from './piece-stream.ts'
import { meetLinks } from './remote-link.ts'
import type { Link } from './remote-link.ts'
import type { SendOptions } from './weight-sender.ts'

export interface ReceiveOptions extends SendOptions {
  /**
   * Starts the sender. A receiver on GPUs needs the gate first, and a sender that started earlier would spin until
   * then.
   */
  begin?: (() => void) | undefined
  /** Called with the bytes received so far and the total. */
  onProgress?: ((done: number, total: number) => void) | undefined
  /**
   * Runs when all bytes are there, before anything is generated from them. Throws if they differ from the sender's,
   * else returns the label.
   */
  settle?: (received: Received) => Promise<string>
  /** How the bytes reach the weights (default `in_place`). */
  swap?: SwapMode | undefined
  /** Default `continue`. */
  onRunning?: OnRunning | undefined
  /** Ends running requests instead of waiting for them (default false). */
  abort?: boolean
  /** Aborted before the first byte is written, nothing changes. */
  signal?: AbortSignal | undefined
}

export interface Received {
  /** The weights that the bytes went to; undefined: those in use. */
  access?: Access | undefined
  /** Runs what uses GPUs beside receives, like a barrier, while no step runs. */
  still: (run: () => Promise<void>) => Promise<void>
}

/** The counterpart of `sendWeights`: receives every parameter over joined links. Only `settle` changes the label. */
export async function receiveWeights (
  store: WeightStore,
  links: readonly Link[],
  options: ReceiveOptions
): Promise<WriteReport> {
  const { swap = 'in_place', onRunning = 'continue', abort = false } = options
  const shadow = chooseSet(store.shadow, { swap, onRunning, abortAllRequests: abort })
  return options.layout === 'parameters' && shadow === null
    ? await receiveParameters(store, links, options)
    : await receiveTensors(store, links, options, shadow)
}

async function receiveParameters (
  store: WeightStore,
  links: readonly Link[],
  { timeoutMs, begin, settle, abort = false, signal }: ReceiveOptions
): Promise<WriteReport> {
  const { addon, core, table } = store
  const started = performance.now()
  await overwriteWeights(store, async () => {
    await allOf(
      links.map(async (link, rank) => {
        await addon.groupParams(link.handle, core, rank, 0, timeoutMs, store.ledger.set)
      }),
      reason => {
        for (const link of links) link.abort(reason)
      }
    )
    return await settle?.({ still: async run => await run() })
  }, {
    abort,
    deadlineMs: timeoutMs,
    signal,
    needsGate: links.some(({ onGpus }) => onGpus),
    ready: async () => {
      begin?.()
      await meetLinks(links, timeoutMs)
    }
  })
  const ms = performance.now() - started
  const bytes = weightBytes(table)
  const tensors = [...table.tensors.values()].filter(({ alternative }) => !alternative).length
  return {
    source: DISTRIBUTED.name,
    tensors,
    bytes,
    missing: [],
    missingCount: 0,
    ignored: [],
    ms: { plan: 0, gate: 0, write: ms, verify: 0, total: ms },
    gbPerSecond: bytes / 1e6 / Math.max(ms, 1e-3)
  }
}

async function receiveTensors (
  store: WeightStore,
  links: readonly Link[],
  options: ReceiveOptions,
  shadow: ShadowSet | null
): Promise<WriteReport> {
  const { timeoutMs, settle, abort = false, signal } = options
  const layout = layOutCheckpoint(store.table)
  const onGpus = links.some(link => link.onGpus)
  // In place, the update has the gate.
  const still = async (run: () => Promise<void>): Promise<void> =>
    shadow !== null && onGpus ? await store.runBetweenSteps(run, timeoutMs) : await run()
  const source: WeightSource = {
    kind: 'streamed',
    transport: DISTRIBUTED,
    tensors: layout.tensors.map(({ plan: { name, dtype, shape }, offset }) => (
      { name, dtype, shape, source: 0, offset }
    )),
    stream: streamOf(store, links, options, { layout, still }),
    verify: async () => {},
    close: async () => {}
  }
  const update = await store.update({
    abortAllRequests: abort,
    deadlineMs: timeoutMs,
    swap: shadow === null ? 'in_place' : 'demand',
    ...options.onRunning === undefined ? {} : { onRunning: options.onRunning }
  })
  const { epoch } = store
  try {
    if (store.transactions.current !== null) {
      throw new RefitError(
        'CONFLICT',
        "a trainer's update of many requests is open on this engine: it cannot load from another engine meanwhile"
      )
    }
    signal?.throwIfAborted()
    const report = await update.write(source)
    const written = performance.now()
    const version = await settle?.({ access: shadow?.access, still })
    const settled = performance.now()
    await update.commit({ requireAll: true, ...version === undefined ? {} : { version } })
    return {
      ...report,
      ms: {
        ...report.ms,
        verify: report.ms.verify + settled - written,
        ...swapTimes(update.swapped),
        total: report.ms.total + performance.now() - written
      }
    }
  } catch (error) {
    // The bytes that arrived have not been compared.
    if (store.epoch !== epoch) {
      store.ledger.markAllTorn(
        `they were loaded from another engine: ${errorMessage(error)}`
      )
    }
    await update.abort(errorMessage(error))
    throw error
  }
}

function streamOf (
  store: WeightStore,
  links: readonly Link[],
  { layout: way, pieceBytes, timeoutMs, begin, onProgress }: ReceiveOptions,
  { layout, still }: { layout: ReturnType<typeof layOutCheckpoint>, still: Received['still'] }
): WeightStream {
  const { addon, core } = store
  const meet = async (): Promise<void> => {
    begin?.()
    await meetLinks(links, timeoutMs)
  }
  if (way === 'parameters') {
    return new ParameterStream({
      links,
      bytes: layout.bytes,
      begin: async () => {
        await still(meet)
      },
      receive: async ({ handle }, rank, set) => {
        await addon.groupParams(handle, core, rank, 0, timeoutMs, set)
      }
    })
  }
  const [{ handle, onGpus }] = links as [Link]
  return new PieceStream({
    addon,
    group: handle,
    needsGate: onGpus,
    pieces: [...cutCheckpoint(layout, pieceBytes)],
    timeoutMs,
    begin: meet,
    still,
    onProgress: bytes => {
      onProgress?.(bytes, layout.bytes)
    }
  })
}

/** Throws WEIGHTS_MISMATCH unless the checksums equal the sender's. */
export function verifyChecksums (
  own: readonly { name: string, checksum: string }[],
  sent: Readonly<Record<string, string>>
): void {
  const wrong = own.filter(({ name, checksum }) => sent[name] !== checksum).map(({ name }) => name)
  const extra = Object.keys(sent).length - (own.length - wrong.filter(name => !(name in sent)).length)
  if (wrong.length === 0 && extra === 0) return
  const shown = wrong.length === 0
    ? `the sender has ${extra} more tensors`
    : `${wrong.slice(0, 5).join(', ')}${wrong.length > 5 ? ` and ${wrong.length - 5} more` : ''}`
  throw new RefitError(
    'WEIGHTS_MISMATCH',
    `the received weights differ from the sent ones: checksums differ (${shown})`,
    { param: wrong[0] ?? 'checksums' }
  )
}
