import { readFileSync } from 'node:fs'
import { freemem } from 'node:os'

/**
 * Bytes of host memory that can be had now. A memory limit (cgroup) counts the page cache of files as used, above all that of the
 * checkpoint just read, although it gives way: it is added here, up to what the whole machine has.
 */
export function availableMemory (
  reported: number = process.availableMemory(),
  whole: number = freemem(),
  stat: string = memoryStat()
): number {
  const number = (name: string): string | undefined => new RegExp(`^${name} (\\d+)$`, 'm').exec(stat)?.[1]
  // The limit counts the groups below, too, as do those fields in the older hierarchy.
  const field = (name: string): number => Number(number(`total_${name}`) ?? number(name) ?? 0)
  return Math.max(reported, Math.min(whole, reported + field('inactive_file') + field('active_file')))
}

/** memory.stat of this process's group in the unified hierarchy, or of a container's in the older one; empty where there is neither. */
function memoryStat (): string {
  const path = /^0::(.*)$/m.exec(read('/proc/self/cgroup'))?.[1]
  return (path === undefined ? '' : read(`/sys/fs/cgroup${path}/memory.stat`)) ||
    read('/sys/fs/cgroup/memory/memory.stat')
}

/** Empty where there is no such file. */
function read (path: string): string {
  try {
    return readFileSync(path, 'utf8')
  } catch {
    return ''
  }
}
