import type { NativeGroups } from '../native/groups.ts'

/** What process groups need of an engine in this process, whose ranks join them. */
export interface GroupHost {
  readonly native: NativeGroups
  /** Handle of the native core that the ranks belong to. */
  readonly core: number
  readonly device: 'cpu' | 'cuda'
  readonly ranks: number
  /**
   * Runs while no step does, from the next step boundary on; running requests stay. Where a transaction holds the gate, within it, between
   * two of its writes. DEADLINE where the gate was not to be had within `deadlineMs`.
   */
  runBetweenSteps: <T>(run: () => Promise<T>, deadlineMs: number) => Promise<T>
}
