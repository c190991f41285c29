import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import type { Metrics } from './metrics.ts'
import type { Tokenizer } from '../text/tokenizer.ts'
import type { PeerLoads } from '../peer/peer-loads.ts'
import type { SendGroups } from '../peer/send-groups.ts'
import type { WeightGroups } from '../process-groups/weight-groups.ts'
import type { DistributedReceiver } from '../sources/distributed/distributed.ts'
import type { KeptTensors } from '../sources/tensor/kept-tensors.ts'
import type { TensorReceiver } from '../sources/tensor/tensor-receiver.ts'
import type { UploadReceiver } from '../sources/upload/upload-receiver.ts'
import type { WeightPulls } from '../deltas/weight-pulls.ts'
import type { WeightSource } from '../contract/weight-source.ts'
import type { LiveRequests } from './live-requests.ts'
import type { LoadedFrom } from './sglang/loaded-from.ts'

/** What the routes of one plugin instance share. */
export interface RouteContext {
  engine: RolloutEngine
  /** Null: token ids only. */
  tokenizer: Tokenizer | null
  live: LiveRequests
  metrics: Metrics
  /** Most samples of one request. */
  maxBatch: number
  /** Opens a checkpoint inside the allowed roots. */
  openCheckpoint: (path: string) => Promise<WeightSource>
  /** Opens what trainers share; `discard` gives back what a refused body shares. */
  tensors: Pick<TensorReceiver, 'open' | 'openHandle' | 'openOffer' | 'discard'>
  /** What they ask to keep between requests. */
  kept: KeptTensors
  /** Process groups that trainers broadcast through, and what they announce to broadcast. */
  groups: WeightGroups
  distributed: DistributedReceiver
  /** Groups in which this engine's weights go to others; null where it holds none in this process. */
  sending: SendGroups | null
  /** Takes the weights of others; null likewise. */
  peerLoads: PeerLoads | null
  /** Takes what trainers send. */
  uploads: UploadReceiver
  /** Keeps checkpoints on this host up to date. */
  pulls: WeightPulls
  /** Names of the dialects that `--dialects` chose. */
  dialects: ReadonlySet<string>
  loaded: LoadedFrom
  /** Of the program, for `/server_info`. */
  version: string
  /** Seconds since the epoch at which the server began. */
  startedAt: number
}

/** A file of routes. */
export type Routes = FastifyPluginAsyncTypebox<{ context: RouteContext }>
