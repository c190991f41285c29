import { randomUUID } from 'node:crypto'
import { RefitError } from '../errors.ts'
import type { HeldWeights } from '../engine/held-weights.ts'
import type { EngineInfo } from '../contract/rollout-engine.ts'
import { tableDigest } from '../model/describe-model.ts'
import { showAddress } from '../rendezvous/connection.ts'
import { Deadline } from '../rendezvous/deadline.ts'
import { checksums } from '../weights/checksum.ts'
import type { WriteReport } from '../contract/weight-source.ts'
import { allOf, asRefitError } from './all-of.ts'
import { chooseRoute, loadRefusal } from './fleet-info.ts'
import type { FleetInfo, Receiver, Route } from './fleet-info.ts'
import { localAddress } from '../process-groups/local-address.ts'
import { isLater, LOAD_FROM, Peer } from './peer.ts'
import type { SendGroupRequest, PeerOptionNames, SendReply } from './peer.ts'
import { joinLinks, leave } from './remote-link.ts'
import type { Link } from './remote-link.ts'
import { hostStores } from './remote-stores.ts'
import { linkName } from './send-groups.ts'
import { verifyChecksums, receiveWeights } from './weight-receiver.ts'

export interface PeerLoadOptions {
  /** Of the engine that has the weights. */
  url: string
  /** Its admin key, or its API key where it has no other. */
  key?: string | undefined
  /** Longest wait until it is ready, and for each step of the transfer (default 300 s). */
  timeoutMs?: number | undefined
  /** Most bytes of one broadcast (default 64 MiB). */
  pieceBytes?: number | undefined
  /** Path of libnccl.so.2, which must be of the same version as the other engine's; default where the addon finds it. */
  ncclPath?: string | undefined
  onProgress?: ((done: number, total: number) => void) | undefined
  /** What is waited for, and how the weights come. */
  log?: ((line: string) => void) | undefined
}

/** For an engine that serves while it is filled. */
export interface LiveLoadOptions {
  /** Gives it up. Before the first byte nothing has changed; after it, all weights are torn. */
  signal?: AbortSignal | undefined
  /** Ends running requests instead of waiting for them (default false). */
  abort?: boolean
  /** Runs what allocates on cards while no step runs (default at once: nothing has been generated yet). */
  still?: <T>(run: () => Promise<T>) => Promise<T>
  /** What its owner calls the address and the key of the other one. */
  words?: PeerOptionNames
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
/** What the peer has to say of a failure may take so long to come. */
const GRACE_MS = 1000

/**
 * Fills the weights of an engine from another one that serves, and takes its label: nothing is generated between the first byte and the end of the
 * comparison. Waits while the other one is not ready; throws for all else, in words, and then this engine holds nothing that may be used:
 * ENGINE_FAILED, WEIGHTS_MISMATCH (another model or dtype, or bytes that differ in the end), CONFIG (its key), DEADLINE, GROUP_*.
 */
export async function loadFromPeer (
  own: OwnEngine,
  options: PeerLoadOptions,
  running: LiveLoadOptions = {}
): Promise<PeerLoadResult> {
  const { url, key, timeoutMs = TIMEOUT_MS, log = () => {} } = options
  const { words = LOAD_FROM } = running
  const peer = new Peer(url, key, words)
  const { store, model, device, info } = own
  const receiver: Receiver = {
    model,
    tensors: tableDigest(store.table),
    dtype: info.dtype,
    device,
    cards: info.gpus.map(({ uuid }) => uuid),
    ranks: store.table.ranks
  }
  const deadline = new Deadline({ signal: running.signal }, timeoutMs)
  let said = ''
  try {
    for (;;) {
      const waiting = await attempt()
      if (typeof waiting !== 'string') return waiting
      if (waiting !== said) log(`waiting for ${peer.url}: ${said = waiting}`)
      if (deadline.timeoutMs === 0) throw deadline.passed(`${peer.url} was not ready to fill this engine: ${waiting}`)
      await deadline.sleep(POLL_MS)
    }
  } finally {
    await peer.close()
  }

  /** Why it cannot be yet, in words, or what was done. */
  async function attempt (): Promise<PeerLoadResult | string> {
    try {
      running.signal?.throwIfAborted()
      const info = await peer.info()
      if (info.engine === store.id) {
        throw new RefitError('INVALID_REQUEST', `${peer.url} is this very engine: it is filled from another one`, {
          param: words
            .url
        })
      }
      const reason = loadRefusal(receiver, info)
      if (reason !== undefined) {
        throw new RefitError('WEIGHTS_MISMATCH', `this engine cannot be filled from ${peer.url}: ${reason}`)
      }
      if (info.not_ready !== null) return info.not_ready
      const route = chooseRoute(receiver, info)
      log(
        `weights come from ${peer.url} (version ${
          JSON.stringify(info.weight_version)
        }, tp ${info.tp_size}) over ${route.backend}, as ${route.why}; ` +
          (route.layout === 'parameters'
            ? 'each rank from its own'
            : `whole tensors, as it has ${info.tp_size} ranks on ${info.device} and this engine ${receiver.ranks} on ${receiver.device}`)
      )
      return await transfer(own, peer, info, route, options, running)
    } catch (error) {
      if (isLater(error) && running.signal?.aborted !== true) return error.message
      throw error
    }
  }
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
  const { signal, abort = false, still = async run => await run() } = running
  const { store } = own
  const { table } = store
  const stop = new AbortController()
  const given = (): void => {
    stop.abort(signal!.reason)
  }
  signal?.addEventListener('abort', given)
  const deadline = new Deadline({ timeoutMs, signal: stop.signal }, timeoutMs)
  const isDirect = route.layout === 'parameters'
  // Of whole tensors, host memory takes one copy for all ranks, and cards one each.
  const ranks = isDirect || route.backend === 'gloo' ? 1 : table.ranks
  // The peer's port does not matter: no packet is sent.
  const host = await localAddress(showAddress({ host: await peer.address(), port: 9 }))
  const stores = await hostStores(host, new Array<number>(isDirect ? peerRanks : 1).fill(0), deadline)
  const links: Link[] = []
  const end = async (): Promise<void> => {
    for (const link of links) await link.end(true).catch(() => {})
  }
  try {
    const group: SendGroupRequest = {
      master_address: host,
      ports: stores.ports.join(','),
      group_rank: 0,
      world_size: 1 + ranks,
      group_name: `load-${randomUUID()}`,
      backend: route.backend,
      layout: route.layout,
      receiver_hosts: true,
      barrier: true,
      piece_bytes: pieceBytes,
      timeout: timeoutMs / 1000
    }
    const wanted = stores.clients.map((client, i) => ({
      addon: store.addon,
      core: store.core,
      backend: route.backend,
      store: client,
      name: linkName(group.group_name, stores.ports[i]!, i),
      size: group.world_size,
      rank: 1,
      ranks,
      ...isDirect ? { coreRank: i } : {},
      ncclPath,
      host
    }))
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
        settle: async () => {
          await leave(links, timeoutMs)
          const timer = setTimeout(() => {
            stop.abort(
              new RefitError(
                'DEADLINE',
                `${peer.url} has sent all, and has not said within ${timeoutMs / 1000} s what it was`
              )
            )
          }, timeoutMs)
          const { checksums: theirs, weight_version: version } = await send().finally(() => {
            clearTimeout(timer)
          })
          verifyChecksums((await checksums(store)).tensors, theirs)
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

/** Takes the weights; `receive` asks for them, once, when it is ready. What the peer says of a failure explains it better than what is seen of it here. */
async function exchange (
  peer: Peer,
  group: SendGroupRequest,
  links: readonly Link[],
  stop: AbortController,
  receive: (send: () => Promise<SendReply>) => Promise<WriteReport>
): Promise<{ sent: SendReply, report: WriteReport }> {
  let said: unknown
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
        said ??= error
        for (const link of links) link.abort(`the sender says: ${(error as Error).message}`)
        throw error
      }
    ))
  try {
    const report = await receive(send)
    return { sent: await send(), report }
  } catch (error) {
    // The peer knows more where it has broken off itself; where it only waits, it has to be told.
    const timer = setTimeout(() => {
      stop.abort(asRefitError(error))
    }, GRACE_MS)
    await sending?.catch(() => {})
    clearTimeout(timer)
    throw asRefitError(said ?? error)
  } finally {
    stop.signal.removeEventListener('abort', stopped)
  }
}
