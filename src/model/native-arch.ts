import type { NativeArch } from '../native/core-config.ts'
import type { Architecture } from './architecture.ts'

/** What the addon must know of an architecture. */
export function toNativeArch (arch: Architecture): NativeArch {
  const { moe } = arch
  return {
    hiddenSize: arch.hiddenSize,
    layers: arch.layers,
    heads: arch.heads,
    kvHeads: arch.kvHeads,
    headDim: arch.headDim,
    vocabSize: arch.vocabSize,
    rmsNormEps: arch.rmsNormEps,
    ropeInvFreq: arch.rope.invFreq,
    ropeScale: arch.rope.scale,
    sparseLayers: Uint8Array.from({ length: arch.layers }, (_, i) => moe?.sparse[i] === true ? 1 : 0),
    experts: moe?.experts ?? 0,
    expertsPerToken: moe?.expertsPerToken ?? 0,
    normTopkProb: moe?.normTopkProb ?? false
  }
}
