import { readFileSync } from 'node:fs'
import { freemem } from 'node:os'

/**
 * Host memory that is available now, in bytes. A memory limit (cgroup) counts the page cache as used, above all that of
 * the checkpoint just read, although the kernel can drop it. It is added here, up to what the whole machine has
 * available.
 */
export function availableMemory (
  reported: number = process.availableMemory(),
  whole: number = freemem(),
  stat: string = memoryStat()
): number {
  const number = (name: string): string | undefined => new RegExp(`^${name} (\\d+)$`, 'm').exec(stat)?.[1]
  // The limit includes the groups below this one, as these fields do in cgroup v1.
  const field = (name: string): number => Number(number(`total_${name}`) ?? number(name) ?? 0)
  return Math.max(reported, Math.min(whole, reported + field('inactive_file') + field('active_file')))
}

/** memory.stat of this process's group in cgroup v2, or of a container's in v1; empty if there is neither. */
function memoryStat (): string {
  const path = /^0::(.*)$/m.exec(read('/proc/self/cgroup'))?.[1]
  return (path === undefined ? '' : read(`/sys/fs/cgroup${path}/memory.stat`)) ||
    read('/sys/fs/cgroup/memory/memory.stat')
}

/** Empty if the file does not exist. */
function read (path: string): string {
  try {
    return readFileSync(path, 'utf8')
  } catch {
    return ''
  }
}
