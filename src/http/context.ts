import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import type { RolloutEngine } from '../engine/rollout-engine.ts'
import type { Metrics } from '../metrics.ts'
import type { Tokenizer } from '../text/tokenizer.ts'
import type { KeptTensors } from '../sources/kept-tensors.ts'
import type { TensorReceiver } from '../sources/tensor-receiver.ts'
import type { UploadReceiver } from '../sources/upload-receiver.ts'
import type { WeightSource } from '../weights/source.ts'
import type { LiveRequests } from './live-requests.ts'

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
  tensors: Pick<TensorReceiver, 'open' | 'discard'>
  /** What they ask to keep between requests. */
  kept: KeptTensors
  /** Takes what trainers send. */
  uploads: UploadReceiver
  /** Where the weights came from last; SGLang's clients read it back. */
  loaded: { modelPath: string, loadFormat: string }
  /** Of the program, for `/server_info`. */
  version: string
  /** Seconds since the epoch at which the server began. */
  startedAt: number
}

/** A file of routes. */
export type Routes = FastifyPluginAsyncTypebox<{ context: RouteContext }>
