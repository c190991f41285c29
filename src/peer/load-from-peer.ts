import { randomUUID } from 'node:crypto'
import { RefitError } from '../errors.ts'
import type { HeldWeights } from '../engine/held-weights.ts'
import type { EngineInfo } from '../contract/rollout-engine.ts'
import { layoutDigest, tableDigest } from '../model/describe-model.ts'
import { showAddress } from '../rendezvous/connection.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import { checksums } from '../weights/checksum.ts'
import type { WriteReport } from '../contract/weight-source.ts'
import type { OnRunning, SwapMode } from '../contract/weight-update.ts'
import { allOf, asRefitError } from './all-of.ts'
import { chooseRoute, loadRefusal } from './fleet-info.ts'
import type { FleetInfo, Receiver, Route } from './fleet-info.ts'
import { localAddress } from '../process-groups/local-address.ts'
import { isLater, LOAD_FROM, Peer } from './peer.ts'
import type { SendGroupRequest, PeerOptionNames, SendReply } from './peer.ts'
import { joinLinks, leaveLinks } from './remote-link.ts'
import type { Link, LinkOptions } from './remote-link.ts'
import { hostStores } from './remote-stores.ts'
import type { OpenStores } from './remote-stores.ts'
import { linkName } from './send-groups.ts'
import { verifyChecksums, receiveWeights } from './weight-receiver.ts'

export interface PeerLoadOptions {
  /** URL of the engine that has the weights. */
  url: string
  /** Its admin key, or its API key if it has no other. */
  key?: string | undefined
  /** The limit of the wait until it is ready, and of each step of the transfer (default 300 s). */
  timeoutMs?: number | undefined
  /** The most bytes of one broadcast (default 64 MiB). */
  pieceBytes?: number | undefined
  /** Path of libnccl.so.2, which must have the version of the other engine's; default: the one that the addon finds. */
  ncclPath?: string | undefined
  onProgress?: ((done: number, total: number) => void) | undefined
  /** Called with a text when the load starts to wait, and with the chosen route. */
  log?: ((line: string) => void) | undefined
}

/** Options for an engine that serves while it loads. */
export interface LiveLoadOptions {
  /** Aborts the load. Before the first byte nothing has changed; after it, all weights are torn, if in place. */
  signal?: AbortSignal | undefined
  /** Ends running requests instead of waiting for them (default false). */
  abort?: boolean
  /** How the bytes reach the weights (default `in_place`). */
  swap?: SwapMode | undefined
  /** Default `continue`. */
  onRunning?: OnRunning | undefined
  /**
   * Runs calls that allocate on GPUs while no step runs. Default: at once, because an engine that starts runs no steps.
   */
  still?: <T>(run: () => Promise<T>) => Promise<T>
  /** The names of the options that hold the peer's address and key, for messages. */
  names?: PeerOptionNames
}

export interface PeerLoadResult {
  report: WriteReport
  version: string
  route: Route
}

export type OwnEngine = HeldWeights & { info: Pick<EngineInfo, 'gpus'> & { dtype: string } }

const TIMEOUT_MS = 300_000
const PIECE_BYTES = 64 << 20
const POLL_MS = 500
/** How long to wait for the peer's own report of a failure. */
const GRACE_MS = 1000

/**
 * Loads the weights and the label of another engine, which continues to serve. Waits while the peer is not ready.
 * In place, nothing is generated between the first byte and the end of the comparison, and after a failure the weights
 * are torn. Throws ENGINE_FAILED, WEIGHTS_MISMATCH (another model or dtype, or bytes that differ in the end), CONFIG
 * (the key), DEADLINE, GROUP_*.
 */
export async function loadFromPeer (
  own: OwnEngine,
  options: PeerLoadOptions,
  running: LiveLoadOptions = {}
): Promise<PeerLoadResult> {
  const { url, key, timeoutMs = TIMEOUT_MS, log = () => {} } = options
  const { names = LOAD_FROM } = running
  const peer = new Peer(url, key, names)
  const { store, model, device, info } = own
  const receiver: Receiver = {
    model,
    tensors: tableDigest(store.table),
    parameters: layoutDigest(store.table),
    dtype: info.dtype,
    device,
    gpus: info.gpus.map(({ uuid }) => uuid),
    ranks: store.table.ranks
  }
  const deadline = new Deadline({ signal: running.signal }, timeoutMs)
  let logged = ''
  try {
    for (;;) {
      const waiting = await attempt()
      if (typeof waiting !== 'string') return waiting
      if (waiting !== logged) log(`waiting for ${peer.url}: ${logged = waiting}`)
      if (deadline.timeoutMs === 0) throw deadline.passed(`${peer.url} was not ready to send its weights: ${waiting}`)
      await deadline.sleep(POLL_MS)
    }
  } finally {
    await peer.close()
  }

  /** The result, or the reason why the peer is not ready yet. */
  async function attempt (): Promise<PeerLoadResult | string> {
    try {
      running.signal?.throwIfAborted()
      const info = await peer.info()
      if (info.engine === store.id) {
        throw new RefitError('INVALID_REQUEST', `${peer.url} is this engine itself; expected another one`, {
          param: names.url
        })
      }
      const reason = loadRefusal(receiver, info)
      if (reason !== undefined) {
        throw new RefitError('WEIGHTS_MISMATCH', `this engine cannot load weights from ${peer.url}: ${reason}`)
      }
      if (info.not_ready !== null) return info.not_ready
      const route = chooseRoute(receiver, info)
      log(
        `weights come from ${peer.url} (version ${JSON.stringify(info.weight_version)}, tp ${info.tp_size}) ` +
          `over ${route.backend}, because ${route.why}; ${layoutText(route, info, receiver)}`
      )
      return await transfer(own, peer, info, route, options, running)
    } catch (error) {
      if (isLater(error) && running.signal?.aborted !== true) return error.message
      throw error
    }
  }
}

function layoutText ({ layout }: Route, { tp_size: ranks, device, parameters }: FleetInfo, own: Receiver): string {
  if (layout === 'parameters') return 'each rank from its own'
  if (ranks === own.ranks && parameters !== own.parameters) {
    return 'whole tensors, because one of the two is deterministic and its ranks hold other parts'
  }
  return `whole tensors, because it has ${ranks} ranks on ${device} and this engine ${own.ranks} on ${own.device}`
}

async function transfer (
  own: OwnEngine,
  peer: Peer,
  { tp_size: peerRanks }: FleetInfo,
  route: Route,
  options: PeerLoadOptions,
  running: LiveLoadOptions
): Promise<PeerLoadResult> {
  const { timeoutMs = TIMEOUT_MS, pieceBytes = PIECE_BYTES, ncclPath, onProgress } = options
  const { signal, abort = false, still = async run => await run(), swap, onRunning } = running
  const { store } = own
  const { table } = store
  const stop = new AbortController()
  const given = (): void => {
    stop.abort(signal!.reason)
  }
  signal?.addEventListener('abort', given)
  const deadline = new Deadline({ timeoutMs, signal: stop.signal }, timeoutMs)
  const isDirect = route.layout === 'parameters'
  // Whole tensors: one copy in host memory serves all ranks; over NCCL each GPU receives its own.
  const ranks = isDirect || route.backend === 'gloo' ? 1 : table.ranks
  // The peer's port does not matter: no packet is sent.
  const host = await localAddress(showAddress({ host: await peer.address(), port: 9 }))
  const stores = await hostStores(host, new Array<number>(isDirect ? peerRanks : 1).fill(0), deadline)
  const links: Link[] = []
  const end = async (): Promise<void> => {
    for (const link of links) await link.end(true).catch(() => {})
  }
  try {
    const group = groupRequest(host, stores, route, { size: 1 + ranks, pieceBytes, timeoutMs })
    const wanted = linkOptions(own, group, stores, { route, ranks, ncclPath })
    await allOf<unknown>([peer.init(group, stop.signal), joinLinks(wanted, { deadline, still }, links)], (_, error) => {
      stop.abort(asRefitError(error))
    })
    const { sent, report } = await exchange(peer, group, links, stop, async send =>
      await receiveWeights(store, links, {
        layout: route.layout,
        pieceBytes,
        timeoutMs,
        onProgress,
        abort,
        signal: stop.signal,
        begin: () => {
          send().catch(() => {})
        },
        swap,
        onRunning,
        settle: async ({ access, still }) => {
          await still(async () => {
            await leaveLinks(links, timeoutMs)
          })
          const timer = setTimeout(() => {
            stop.abort(
              new RefitError(
                'DEADLINE',
                `${peer.url} has sent all weights, but not replied with their checksums within ${timeoutMs / 1000} s`
              )
            )
          }, timeoutMs)
          const { checksums: theirs, weight_version: version } = await send().finally(() => {
            clearTimeout(timer)
          })
          verifyChecksums((await checksums(store, access)).tensors, theirs)
          return version
        }
      }))
    return { report, version: sent.weight_version, route }
  } finally {
    signal?.removeEventListener('abort', given)
    for (const link of links) link.abort('the transfer has ended')
    if (links.some(link => link.onGpus)) await still(end).catch(end)
    else await end()
    await stores.close()
  }
}

function groupRequest (
  host: string,
  { ports }: OpenStores,
  { backend, layout }: Route,
  { size, pieceBytes, timeoutMs }: { size: number, pieceBytes: number, timeoutMs: number }
): SendGroupRequest {
  return {
    master_address: host,
    ports: ports.join(','),
    group_rank: 0,
    world_size: size,
    group_name: `load-${randomUUID()}`,
    backend,
    layout,
    receiver_hosts: true,
    barrier: true,
    piece_bytes: pieceBytes,
    timeout: timeoutMs / 1000
  }
}

function linkOptions (
  { store: { addon, core } }: OwnEngine,
  { master_address: host, group_name: name, world_size: size }: SendGroupRequest,
  { clients, ports }: OpenStores,
  { route: { backend, layout }, ranks, ncclPath }: { route: Route, ranks: number, ncclPath: string | undefined }
): LinkOptions[] {
  return clients.map((client, i) => ({
    addon,
    core,
    backend,
    store: client,
    name: linkName(name, ports[i]!, i),
    size,
    rank: 1,
    ranks,
    ...layout === 'parameters' ? { coreRank: i } : {},
    ncclPath,
    host
  }))
}

/**
 * Runs the transfer; `receive` calls `send` when it is ready. If both sides fail, the peer's error is thrown, because
 * it explains the failure better than the symptoms on this side.
 */
async function exchange (
  peer: Peer,
  group: SendGroupRequest,
  links: readonly Link[],
  stop: AbortController,
  receive: (send: () => Promise<SendReply>) => Promise<WriteReport>
): Promise<{ sent: SendReply, report: WriteReport }> {
  let peerError: unknown
  let sending: Promise<SendReply> | undefined
  const { master_address: masterAddress, ports, group_name: groupName } = group
  const stopped = (): void => {
    for (const link of links) link.abort((stop.signal.reason as Error).message)
  }
  stop.signal.addEventListener('abort', stopped)
  if (stop.signal.aborted) stopped()
  const send = async (): Promise<SendReply> =>
    await (sending ??= peer.send({ master_address: masterAddress, ports, group_name: groupName }, stop.signal).catch(
      (error: unknown) => {
        peerError ??= error
        for (const link of links) link.abort(`the sender reports: ${(error as Error).message}`)
        throw error
      }
    ))
  try {
    const report = await receive(send)
    return { sent: await send(), report }
  } catch (error) {
    // A peer that has failed reports it within GRACE_MS. A peer that only waits must be stopped.
    const timer = setTimeout(() => {
      stop.abort(asRefitError(error))
    }, GRACE_MS)
    await sending?.catch(() => {})
    clearTimeout(timer)
    throw asRefitError(peerError ?? error)
  } finally {
    stop.signal.removeEventListener('abort', stopped)
  }
}
