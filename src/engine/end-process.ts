import { native } from '../native/load-addon.ts'

/**
 * Ends the process at once: no handler runs and no thread is waited for. For a process whose device is lost, where every other way
 * to end would wait for threads that are stuck in it.
 */
export function endProcess (exitCode: number): never {
  return native().endProcess(exitCode)
}
