import { RefitError } from '../errors.ts'
import type { Architecture } from '../model/architecture.ts'
import type { ExpertLayout } from '../contract/rollout-engine.ts'

/**
 * The layout of experts that an engine with --enable-return-routed-experts records; null without it. Throws CONFIG for
 * a model without experts.
 */
export function recordedLayout (arch: Architecture, isEnabled: boolean): ExpertLayout | null {
  if (!isEnabled) return null
  const sparse = [...arch.sparseLayers.keys()].filter(layer => arch.sparseLayers[layer] === 1)
  if (sparse.length === 0) {
    throw new RefitError(
      'CONFIG',
      `--enable-return-routed-experts: ${arch.name} has no experts that tokens could be routed to; leave it out`,
      { param: 'enable-return-routed-experts' }
    )
  }
  return { layers: arch.layers, sparse, experts: arch.experts, perToken: arch.expertsPerToken }
}

/** Number of experts recorded for each token. */
export function recordedPerToken (layout: ExpertLayout | null): number {
  return layout === null ? 0 : layout.sparse.length * layout.perToken
}

/** Host memory for them, in bytes per token of KV cache. */
export function recordedBytes (layout: ExpertLayout | null): number {
  return recordedPerToken(layout) * Uint16Array.BYTES_PER_ELEMENT
}
