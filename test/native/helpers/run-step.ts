import type { NativeAddon } from '../../../src/native/addon.ts'
import type { StepBatch, StepResult } from '../../../src/native/step.ts'

/** Runs one step on a core. */
export function runStep (addon: NativeAddon, core: number, batch: StepBatch): StepResult {
  addon.beginStep(core, batch)
  return addon.collectStep(core)
}
