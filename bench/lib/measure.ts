import { median } from './baseline.ts'

/** The time of one run. */
export interface Cost {
  /** Milliseconds of the clock. */
  ms: number
  /** Milliseconds of processor time of all threads of this process. */
  cpuMs: number
}

/** Runs once, and measures it. */
export async function measure (run: () => Promise<void>): Promise<Cost> {
  const [start, before] = [performance.now(), process.cpuUsage()]
  await run()
  const { user, system } = process.cpuUsage(before)
  return { ms: performance.now() - start, cpuMs: (user + system) / 1000 }
}

/** One figure of both sides in turns: `ours` of each turn against the `other` of the same turn. */
export interface Turn {
  ours: Cost
  other: Cost
}

/** The median of the turns' ratios; above 1, ours is faster. A shared machine's speed drifts between turns. */
export function ratioOf (turns: readonly Turn[], unit: keyof Cost = 'ms'): number {
  return median(turns.map(({ ours, other }) => other[unit] / ours[unit]))
}

/** `ratio 0.97 to 1.02, of processor time 0.99 (5 turns)`, for tables. */
export function spread (turns: readonly Turn[]): string {
  const ratios = turns.map(({ ours, other }) => other.ms / ours.ms)
  const [least, most] = [Math.min(...ratios), Math.max(...ratios)]
  return `ratio ${least.toFixed(2)} to ${most.toFixed(2)}, of processor time ${ratioOf(turns, 'cpuMs').toFixed(2)} ` +
    `(${turns.length} turns)`
}
