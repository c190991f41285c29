import type { PlacedJobs, PlacedSource, Transport } from '../../contract/weight-source.ts'
import type { ShardPlan } from '../../shards/compile-plan.ts'

const SHARDS: Transport = { name: 'shards', readError: 'TENSOR_PAYLOAD' }
/** Parts of them arrive in the parameters themselves. */
export const SHARDS_IN_PLACE: Transport = { ...SHARDS, inPlace: true }

/** A plan's tensors as a source, whose bytes `jobs` delivers. */
export function placedSource (
  plan: ShardPlan,
  jobs: Omit<PlacedJobs, 'counts'>,
  ends: Partial<Pick<PlacedSource, 'transport' | 'verify' | 'close' | 'explain'>> = {}
): PlacedSource {
  return {
    kind: 'placed',
    transport: SHARDS,
    tensors: plan.targets,
    jobs: Object.assign(jobs, { counts: plan.counts }),
    verify: async () => {},
    close: async () => {},
    ...ends
  }
}
