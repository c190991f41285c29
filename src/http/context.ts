import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import type { WeightPulls } from '../deltas/weight-pulls.ts'
import type { PeerLoads } from '../peer/peer-loads.ts'
import type { SendGroups } from '../peer/send-groups.ts'
import type { WeightGroups } from '../process-groups/weight-groups.ts'
import type { UploadReceiver } from '../sources/upload/upload-receiver.ts'
import type { Tokenizer } from '../text/tokenizer.ts'
import type { DiskHost } from '../updates/disk-update.ts'
import type { DistributedHost } from '../updates/distributed-update.ts'
import type { TensorHost } from '../updates/tensor-update.ts'
import type { LiveRequests } from './live-requests.ts'
import type { Metrics } from './metrics.ts'

/** The objects that every route of one plugin instance may use. */
export interface ServerContext {
  engine: RolloutEngine
  metrics: Metrics
  /** Names of the dialects that `--dialects` chose. */
  dialects: ReadonlySet<string>
  /** Version of the program, for `/server_info`. */
  version: string
  /** Seconds since the epoch at which the server began. */
  startedAt: number
}

/** For routes that generate. */
export interface GenerationContext extends ServerContext {
  /** Null: token ids only. */
  tokenizer: Tokenizer | null
  live: LiveRequests
  /** Most samples of one request. */
  maxBatch: number
}

/** For routes that update, send or check weights; it is the host of every use case in src/updates. */
export interface WeightsContext extends ServerContext, DiskHost, DistributedHost, TensorHost {
  engine: RolloutEngine
  metrics: Metrics
  /** Process groups that trainers broadcast through. */
  groups: WeightGroups
  /** Groups in which this engine sends its weights to others; null if it holds none in this process. */
  sending: SendGroups | null
  /** Loads the weights of other engines; null if this one holds none in this process. */
  peerLoads: PeerLoads | null
  /** Receives the uploads of trainers. */
  uploads: UploadReceiver
  /** Keeps checkpoints on this host up to date. */
  pulls: WeightPulls
}

export interface RouteContext extends GenerationContext, WeightsContext {
  engine: RolloutEngine
  metrics: Metrics
}

/** A file of routes, with the part of the context that they use. */
export type Routes<Context extends ServerContext = RouteContext> = FastifyPluginAsyncTypebox<{ context: Context }>

/** The scope that a file of routes registers in. */
export type App = Parameters<Routes>[0]
