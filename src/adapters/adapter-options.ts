import { RefitError } from '../errors.ts'
import type { AdapterLimits } from '../contract/adapters.ts'
import { ADAPTER_TARGETS, LINEAR_TARGETS, slotRank } from '../model/adapter-slots.ts'
import type { AdapterSlots, AdapterTarget } from '../model/adapter-slots.ts'

/** Options of adapters; see EngineOptions. */
export interface AdapterOptions {
  enableLora?: boolean
  maxLoras?: number
  maxLoraRank?: number
  maxCpuLoras?: number
  loraTargetModules?: readonly string[]
}

/** Defaults of the command line's options. */
export const ADAPTER_DEFAULTS = { maxLoras: 4, maxLoraRank: 64, maxCpuLoras: 16 } as const

/** The slots to allocate, and the limits to enforce; null without adapters. Throws CONFIG. */
export function adapterSlots (options: AdapterOptions): { slots: AdapterSlots, limits: AdapterLimits } | null {
  if (options.enableLora !== true) return null
  const { maxLoras: slots, maxLoraRank: maxRank } = { ...ADAPTER_DEFAULTS, ...definedOf(options) }
  const maxLoaded = Math.max(options.maxCpuLoras ?? ADAPTER_DEFAULTS.maxCpuLoras, slots)
  const targets = readTargets(options.loraTargetModules ?? ['all-linear'])
  return {
    // One more than may be in use: a new version is written there while all others are.
    slots: { slots: slots + 1, rank: slotRank(maxRank), targets: new Set(targets) },
    limits: { slots, maxRank, maxLoaded, targets }
  }
}

function definedOf (options: AdapterOptions): AdapterOptions {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined))
}

function readTargets (names: readonly string[]): AdapterTarget[] {
  const targets = names.flatMap(name => {
    if (name === 'all') return [...ADAPTER_TARGETS]
    if (name === 'all-linear') return [...LINEAR_TARGETS]
    const target = ADAPTER_TARGETS.find(known => known === name)
    if (target !== undefined) return [target]
    throw new RefitError(
      'CONFIG',
      `--lora-target-modules: expected all, all-linear or some of ${ADAPTER_TARGETS.join(', ')}, got ` +
        JSON.stringify(name.slice(0, 100)),
      { param: 'lora-target-modules' }
    )
  })
  if (targets.length === 0) {
    throw new RefitError('CONFIG', '--lora-target-modules: expected at least one name', {
      param: 'lora-target-modules'
    })
  }
  return ADAPTER_TARGETS.filter(target => targets.includes(target))
}
