import { readFileSync } from 'node:fs'
import { freemem } from 'node:os'

/**
 * Bytes of host memory that can be had now. A memory limit (cgroup) counts the page cache of files as used, above all that of the
 * checkpoint just read, although it gives way: it is added here, up to what the whole machine has.
 */
export function availableMemory (reported: number = process.availableMemory(), whole: number = freemem(), stat: string = memoryStat()): number {
  const field = (name: string): number => Number(new RegExp(`^${name} (\\d+)$`, 'm').exec(stat)?.[1] ?? 0)
  return Math.max(reported, Math.min(whole, reported + field('inactive_file') + field('active_file')))
}

/** memory.stat of this process's group in the unified hierarchy; empty where there is none. */
function memoryStat (): string {
  try {
    const path = /^0::(.*)$/m.exec(readFileSync('/proc/self/cgroup', 'utf8'))?.[1]
    return path === undefined ? '' : readFileSync(`/sys/fs/cgroup${path}/memory.stat`, 'utf8')
  } catch {
    return ''
  }
}
