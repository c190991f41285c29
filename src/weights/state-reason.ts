import type { WeightState } from '../contract/rollout-engine.ts'
import { RefitError } from '../errors.ts'
import type { MemoryTag } from '../native/addon.ts'

const NAMED = 3

/** Why the weights cannot be used, with at most three of the torn tensors, and the cure. For people and logs. */
export function tornReason ({ tensors, reason }: { tensors: readonly string[], reason: string }): string {
  const more = tensors.length > NAMED ? ` and ${tensors.length - NAMED} more` : ''
  return `weights are torn (${reason}): ${
    tensors.slice(0, NAMED).join(', ')
  }${more}; write them again with any weight update`
}

/** Why nothing is generated while memory is released, and the cure. */
export function asleepReason (tags: readonly MemoryTag[]): string {
  return `the engine is asleep: its memory is released (${tags.join(', ')}); /resume_memory_occupation resumes it`
}

/** The error of an operation that needs the weights' memory. */
export function asleep (what: string): RefitError {
  return new RefitError(
    'CONFLICT',
    `weights cannot be ${what} while their memory is released; resume it with /resume_memory_occupation, ` +
      'tags ["weights"]. Nothing has changed'
  )
}

/** Throws unless the engine may generate in this state. */
export function requireServing (state: WeightState): void {
  if (state.state === 'torn') throw new RefitError('ENGINE_TORN', tornReason(state))
  if (state.state === 'asleep') throw new RefitError('ENGINE_ASLEEP', asleepReason(state.tags))
}
