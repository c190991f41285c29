import { native } from '../native/load-addon.ts'

/**
 * Ends the process at once: no handler runs and no thread is awaited. For a process whose device is lost: any other
 * exit would wait for threads that are stuck.
 */
export function endProcess (exitCode: number): never {
  return native().endProcess(exitCode)
}
