import type { NativeGroups } from '../native/groups.ts'

/** The part of an engine in this process that process groups use. The engine's ranks join the groups. */
export interface GroupHost {
  readonly native: NativeGroups
  /** Handle of the native core that the ranks belong to. */
  readonly core: number
  readonly device: 'cpu' | 'cuda'
  readonly ranks: number
  /**
   * Calls `run` while no step runs, from the next step boundary on; running requests stay. If a transaction holds the
   * gate, it runs inside of it, between two of its writes. Throws DEADLINE if the gate does not shut within
   * `deadlineMs`.
   */
  runBetweenSteps: <T>(run: () => Promise<T>, deadlineMs: number) => Promise<T>
}
