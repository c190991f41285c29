import type { RolloutEngine } from '../contract/rollout-engine.ts'
import type { ModelDescription } from '../model/describe-model.ts'
import type { WeightStore } from '../weights/weight-store.ts'

/** Weights that an engine holds in this process, and what they are of: what it takes to send them to another engine. */
export interface HeldWeights {
  readonly store: WeightStore
  readonly model: ModelDescription
  readonly device: 'cpu' | 'cuda'
}

/** The weights of an engine in this process; undefined for a remote engine, which holds none here. */
export function heldWeights (engine: RolloutEngine): HeldWeights | undefined {
  return (engine as { held?: HeldWeights }).held
}
