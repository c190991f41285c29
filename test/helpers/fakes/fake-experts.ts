import type { ExpertLayout } from '../../../src/contract/rollout-engine.ts'

/** [to - from, sparse layers, experts per token]: by position, layer and place. */
export function fakeExperts ({ sparse, perToken, experts }: ExpertLayout, from: number, to: number): Uint16Array {
  return Uint16Array.from(
    Array
      .from({ length: Math.max(0, to - from) }, (_, i) =>
        sparse
          .map(layer => Array.from({ length: perToken }, (_, j) => ((from + i) * 13 + layer * 5 + j) % experts)))
      .flat(2)
  )
}
