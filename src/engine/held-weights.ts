import type { RolloutEngine } from '../contract/rollout-engine.ts'
import type { ModelDescription } from '../model/describe-model.ts'
import type { WeightStore } from '../weights/weight-store.ts'

/** Weights of an engine in this process and their model: everything needed to send them to another engine. */
export interface HeldWeights {
  readonly store: WeightStore
  readonly model: ModelDescription
  readonly device: 'cpu' | 'cuda'
}

/** The weights of an engine in this process; undefined for a remote engine. */
export function heldWeights (engine: RolloutEngine): HeldWeights | undefined {
  return (engine as { held?: HeldWeights }).held
}
