import { existsSync } from 'node:fs'
import { createRequire } from 'node:module'
import { join } from 'node:path'
import type { NativeAddon } from '../../src/native/addon.ts'
import type { HeldDType } from '../../src/native/dtypes.ts'
import type { Architecture, ModelTable } from '../../src/model/architecture.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { packageRoot } from '../../src/root.ts'
import type { Gate, GateKeeper, SwapOptions } from '../../src/contract/gate.ts'
import { WeightStore } from '../../src/weights/weight-store.ts'
import type { WeightStoreOptions } from '../../src/weights/weight-store.ts'

/** The addon with fault points. */
export function faultyAddon (): NativeAddon {
  const path = join(packageRoot, 'build/faults/refit.node')
  if (!existsSync(path)) throw new Error(`${path} is missing: run "node scripts/build-native.js --faults"`)
  return createRequire(import.meta.url)(path) as NativeAddon
}

/** Gates without a scheduler: they count shuts and record how they were opened. */
export class CountingGates implements GateKeeper {
  shutCount = 0
  openCount = 0
  /** Options of the last request. */
  requested: Parameters<GateKeeper['shut']>[0] | undefined
  last: Parameters<Gate['open']>[0] | undefined
  labels: string[] = []
  swaps: (Parameters<GateKeeper['swap']>[0] & SwapOptions)[] = []
  /** Ends the requests on old weights; undefined if none are awaited. */
  endOld: (() => void) | undefined
  losses: string[] = []
  /** Requests that a pause in place left with KV. */
  holders = 0

  async shut (options: Parameters<GateKeeper['shut']>[0]): Promise<Gate> {
    this.requested = options
    if (this.shutCount !== this.openCount) throw new Error('the gate was shut twice')
    this.shutCount++
    return {
      holders: this.holders,
      open: async options => {
        this.openCount++
        this.last = options
      }
    }
  }

  async swap (state: Parameters<GateKeeper['swap']>[0], options: SwapOptions): Promise<void> {
    this.swaps.push({ ...state, ...options })
    this.last = state
  }

  async oldEnded ({ signal }: Parameters<GateKeeper['oldEnded']>[0]): Promise<void> {
    await new Promise<void>(resolve => {
      this.endOld = resolve
      signal.addEventListener('abort', () => {
        resolve()
      })
    })
    this.endOld = undefined
  }

  relabel (version: string): void {
    this.labels.push(version)
  }
  lost (message: string): void {
    this.losses.push(message)
  }
}

/** A real core with a real store, without a scheduler. */
export function storeOf (
  addon: NativeAddon,
  arch: Architecture,
  ranks: number,
  dtype: HeldDType = 'bfloat16',
  options: Partial<WeightStoreOptions> = {}
): { store: WeightStore, gates: CountingGates, table: ModelTable, close: () => void } {
  const table = buildModelTable(arch, ranks, dtype)
  const core = addon.createCore({
    device: 'cpu',
    ranks,
    threads: 2,
    dtype,
    recipe: arch,
    params: table.params,
    pages: 4,
    pageSize: 16,
    ...options.shadow === true ? { sets: 2 } : {}
  })
  const gates = new CountingGates()
  const store = new WeightStore({ addon, core, table, dtype, gates, ...options })
  return {
    store,
    gates,
    table,
    close: () => {
      addon.closeCore(core)
    }
  }
}
