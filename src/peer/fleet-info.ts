import type { HeldWeights } from '../engine/held-weights.ts'
import type { HeldDType } from '../native/dtypes.ts'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import { layoutDigest, modelDifference, tableDigest } from '../model/describe-model.ts'
import type { ModelDescription } from '../model/describe-model.ts'

/** The version of the messages that engines exchange for a peer load. */
export const FLEET_PROTOCOL = 3

/** The facts about a sending engine that a receiving engine needs: the body of /remote_instance_weights_info. */
export interface FleetInfo {
  server: 'refit'
  version: string
  protocol: number
  /** A unique id of the engine. */
  engine: string
  model: ModelDescription
  /** Digest of names and shapes of all checkpoint tensors, in their order. */
  tensors: string
  /** Digest of names and shapes of a rank's parameters. */
  parameters: string
  dtype: HeldDType
  device: string
  /** The UUID of each rank's GPU; empty on the CPU. */
  cards: string[]
  tp_size: number
  weight_version: string
  /** The reason that it cannot send its weights now; null if it can. */
  not_ready: string | null
}

/** `version`: of this program. `from`: the engine that this one is loading from, or null. */
export function fleetInfo (
  { info, weights, weightVersion, transactions, closed }: RolloutEngine,
  { store, model }: HeldWeights,
  version: string,
  from: string | null
): FleetInfo {
  const notReady = closed
    ? 'it is closed'
    : weights.state === 'torn'
    ? `its weights are torn: ${weights.reason}`
    : weights.state === 'asleep' && weights.tags.includes('weights')
    ? 'the memory of its weights is released'
    : transactions.current !== null
    ? 'a weight transaction is open'
    : from !== null
    ? loadingFrom(from)
    : null
  return {
    server: 'refit',
    version,
    protocol: FLEET_PROTOCOL,
    engine: store.id,
    model,
    tensors: tableDigest(store.table),
    parameters: layoutDigest(store.table),
    dtype: info.dtype,
    device: info.device,
    cards: info.gpus.map(({ uuid }) => uuid),
    tp_size: info.ranks,
    weight_version: weightVersion,
    not_ready: notReady
  }
}

/** Two engines that load from each other would deadlock. */
export function loadingFrom (from: string): string {
  return `it is loading weights itself, from ${from}`
}

/** The facts about a receiving engine. */
export interface Receiver {
  model: ModelDescription
  tensors: string
  parameters: string
  dtype: string
  device: string
  gpus: readonly string[]
  ranks: number
}

/** The reason that one engine cannot load from another; undefined if it can. */
export function loadRefusal (own: Receiver, peer: FleetInfo): string | undefined {
  if (peer.protocol !== FLEET_PROTOCOL) {
    return `it uses protocol ${peer.protocol} between engines (refit ${peer.version}), ` +
      `this engine ${FLEET_PROTOCOL}: ` +
      'use the same version of refit'
  }
  const difference = modelDifference(own.model, peer.model)
  if (difference !== undefined) {
    return `it serves another model: ${difference.field} is ${JSON.stringify(difference.other)} there and ${
      JSON.stringify(difference.own)
    } here`
  }
  if (own.tensors !== peer.tensors) {
    return `it has other checkpoint tensors for this model (refit ${peer.version}): use the same version of refit`
  }
  if (own.dtype !== peer.dtype) {
    return `it holds its weights in ${peer.dtype}, this engine in ${own.dtype}, and weights are copied as they are: ` +
      `use --dtype ${peer.dtype}`
  }
  return undefined
}

/** The route of the weights from one engine to another. */
export interface Route {
  backend: 'nccl' | 'gloo'
  layout: 'parameters' | 'checkpoint'
  why: string
}

/**
 * Chooses by devices: NCCL between different GPUs, else gloo through host memory. With equal numbers of ranks, which
 * hold the same parts of parameters, each rank sends its own.
 */
export function chooseRoute (own: Receiver, peer: FleetInfo): Route {
  const onGpus = own.device === 'cuda' && peer.device === 'cuda'
  const shared = own.gpus.find(uuid => peer.cards.includes(uuid))
  const backend = onGpus && shared === undefined ? 'nccl' : 'gloo'
  const why = shared !== undefined
    ? `both engines use GPU ${shared}, which NCCL refuses`
    : onGpus
    ? 'both engines are on GPUs'
    : own.device === peer.device
    ? 'both engines are on the CPU'
    : `this engine is on ${name(own.device)}, the other on ${name(peer.device)}`
  // Parameters are sent between two host memories, or between two GPUs.
  const isDirect = own.ranks === peer.tp_size && own.parameters === peer.parameters &&
    (backend === 'nccl' || !(own.device === 'cuda' || peer.device === 'cuda'))
  return { backend, layout: isDirect ? 'parameters' : 'checkpoint', why }
}

function name (device: string): string {
  return device === 'cuda' ? 'GPUs' : 'the CPU'
}
