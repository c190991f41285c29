import { Counter, Gauge, Histogram } from 'prom-client'
import type { Registry } from 'prom-client'
import type { AdapterReport, Adapters } from '../contract/adapters.ts'

const LOAD_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30]

/** Metrics of LoRA adapters. Names are labels: an engine has at most `--max-cpu-loras` of them. */
export class AdapterMetrics {
  readonly #loads: Counter<'outcome'>
  readonly #seconds: Histogram<'phase'>
  readonly #bytes: Counter

  constructor (registry: Registry, adapters: Adapters) {
    const registers = [registry]
    this.#loads = new Counter({
      name: 'refit:adapter_loads_total',
      help: 'Loads of LoRA adapters, by outcome',
      labelNames: ['outcome'],
      registers
    })
    for (const outcome of ['success', 'refused']) this.#loads.inc({ outcome }, 0)
    this.#seconds = new Histogram({
      name: 'refit:adapter_load_seconds',
      help: 'Time of loads of LoRA adapters, by phase',
      labelNames: ['phase'],
      buckets: LOAD_BUCKETS,
      registers
    })
    this.#bytes = new Counter({
      name: 'refit:adapter_load_bytes_total',
      help: 'Bytes of LoRA adapters that were loaded',
      registers
    })
    readState(registers, adapters)
  }

  loaded ({ ms, bytes }: AdapterReport): void {
    this.#loads.inc({ outcome: 'success' })
    for (const [phase, value] of Object.entries(ms)) this.#seconds.observe({ phase }, value / 1000)
    this.#bytes.inc(bytes)
  }

  failed (): void {
    this.#loads.inc({ outcome: 'refused' })
  }
}

/** Gauges that read the engine when they are scraped. */
function readState (registers: Registry[], adapters: Adapters): void {
  const gauge = (name: string, help: string, read: () => number): void => {
    const own: Gauge = new Gauge({ name: `refit:${name}`, help, registers, collect: () => own.set(read()) })
  }
  gauge('adapter_slots', 'Slots for versions of adapters that requests use', () => adapters.limits.slots)
  gauge('adapter_slots_used', 'Slots that hold an adapter that a name stands for', () => slotsUsed(adapters))
  gauge('adapters_loaded', 'Adapters that are loaded, in slots or in host memory', () => adapters.list().length)
  const perAdapter = (
    name: string,
    help: string,
    read: (info: ReturnType<Adapters['list']>[number]) => number
  ): void => {
    const own: Gauge<'adapter'> = new Gauge({
      name: `refit:${name}`,
      help,
      labelNames: ['adapter'],
      registers,
      collect: () => {
        own.reset()
        for (const info of adapters.list().slice(0, adapters.limits.maxLoaded)) {
          own.set({ adapter: info.name }, read(info))
        }
      }
    })
  }
  perAdapter('adapter_version', 'Version that the name of an adapter stands for', ({ version }) => version)
  perAdapter('adapter_requests', 'Requests that use this version of an adapter, or wait for it', info => info.requests)
}

export function slotsUsed (adapters: Adapters): number {
  return Math.min(adapters.limits.slots, adapters.list().filter(({ resident }) => resident).length)
}
