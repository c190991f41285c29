import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import type { RolloutEngine, ServingEngine } from '../contract/rollout-engine.ts'
import type { WeightPulls } from '../deltas/weight-pulls.ts'
import type { PeerLoads } from '../peer/peer-loads.ts'
import type { SendGroups } from '../peer/send-groups.ts'
import type { WeightGroups } from '../process-groups/weight-groups.ts'
import type { DistributedReceiver } from '../sources/distributed/distributed.ts'
import type { UploadReceiver } from '../sources/upload/upload-receiver.ts'
import type { ReplyParsers } from '../text/reply-parsers.ts'
import type { Tokenizer } from '../text/tokenizer.ts'
import type { AdapterHost } from '../updates/adapter-load.ts'
import type { DiskHost } from '../updates/disk-update.ts'
import type { DistributedHost } from '../updates/distributed-update.ts'
import type { Loaded, LoadedFrom } from '../updates/loaded-from.ts'
import type { ShardHost } from '../updates/shard-update.ts'
import type { TensorHost } from '../updates/tensor-update.ts'
import type { UpdateLog } from '../updates/update-log.ts'
import type { VersionWaits } from './generation/bound-version.ts'
import type { RequestMemory } from './generation/request-memory.ts'
import type { LiveRequests } from './generation/live-requests.ts'
import type { Metrics } from './metrics.ts'
import type { RecentErrors } from './recent-errors.ts'
import type { SamplingDefaults } from './generation/sampling-defaults.ts'
import type { KeptSamples } from './samples/kept-samples.ts'
import type { TruthMeter } from './samples/truth-meter.ts'
import type { WeightDigests } from './samples/weights-digest.ts'

/** The objects that every route of one plugin instance may use. */
export interface ServerContext {
  engine: ServingEngine
  metrics: Metrics
  /** The checkpoint that the weights came from. */
  loaded: Readonly<Loaded>
  /** The last updates. */
  updates: Pick<UpdateLog, 'get' | 'list' | 'revision'>
  /** Process groups that trainers broadcast through. */
  groups: Pick<WeightGroups, 'list'>
  /** Names of the dialects that `--dialects` chose. */
  dialects: ReadonlySet<string>
  /** Version of the program, for `/server_info`. */
  version: string
  /** Seconds since the epoch at which the server began. */
  startedAt: number
  /** For `/report`. */
  errors: Pick<RecentErrors, 'list' | 'total'>
  facts: ProcessFacts
}

/** Facts about the process for `/report`. */
export interface ProcessFacts {
  platform: string
  /** The options without keys; null if the app did not state them. */
  config: Readonly<Record<string, unknown>> | null
}

/** For routes that generate. */
export interface GenerationContext extends ServerContext {
  /** Null: token ids only. */
  tokenizer: Tokenizer | null
  live: LiveRequests
  /** Holds requests that are bound to a weight version. */
  versions: VersionWaits
  parsers: ReplyParsers
  /** Sampling parameters that requests of OpenAI's routes may leave out. */
  samplingDefaults: SamplingDefaults
  /** Bounds what the results of requests take. */
  memory: RequestMemory
  /** Finished samples. */
  samples: KeptSamples
  digests: WeightDigests
  truth: TruthMeter
  /** Mean difference of logprobs above which a comparison is logged; null: none. */
  truthWarn: number | null
  /** Most samples of one request. */
  maxBatch: number
  /** Replies of vLLM's route have the sampling mask. */
  samplingMasks: boolean
}

/**
 * For routes that update, send or check weights: the host of every use case in src/updates. Only files of UpdateRoutes
 * (updates/update-route.ts) take it.
 */
export interface UpdatesContext extends ServerContext, DiskHost, DistributedHost, ShardHost, AdapterHost {
  engine: RolloutEngine
  metrics: Metrics
  tensors: TensorHost['tensors'] & AdapterHost['tensors']
  distributed: DistributedReceiver
  updates: UpdateLog
  /** True if the path is a folder inside the roots that holds an adapter instead of a checkpoint. */
  isAdapter: (path: string) => Promise<boolean>
  loaded: LoadedFrom
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

/** Both: what the plugin makes, and what the few routes that generate and update take. */
export interface RouteContext extends GenerationContext, UpdatesContext {
  engine: RolloutEngine
  metrics: Metrics
  loaded: LoadedFrom
  groups: WeightGroups
  updates: UpdateLog
}

/** A file of routes, with the part of the context that they use. */
export type Routes<Context extends ServerContext = RouteContext> = FastifyPluginAsyncTypebox<{ context: Context }>

/** The scope that a file of routes registers in. */
export type App = Parameters<Routes>[0]
