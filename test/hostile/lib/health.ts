import { spawn } from 'node:child_process'
import type { ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import { fileURLToPath } from 'node:url'

const PROGRAM = fileURLToPath(new URL('./health-poller.js', import.meta.url))

export interface HealthTimes {
  name: string
  count: number
  /** Milliseconds. */
  median: number
  p99: number
  longest: number
  /** The longest, without the time in which the server or the poller could run and had no CPU: on a busy machine too,
   * this is the server's own doing. */
  worst: number
  /** Time of the worst, in milliseconds since 1970. */
  worstAt: number
  /** Replies other than 200. */
  bad: number
}

/**
 * Starts the process that polls /health, and waits until it has connections: Node.js accepts one in each turn of its
 * event loop, so behind many new ones this would take long. The result ends the process and returns the times of each
 * URL, and of `control`.
 */
export async function pollHealth (
  servers: ReadonlyArray<{ pid: number, url: string }>
): Promise<() => Promise<HealthTimes[]>> {
  const args = servers.flatMap(({ pid, url }) => [String(pid), url])
  const child: ChildProcess = spawn(process.execPath, [PROGRAM, ...args], { stdio: ['pipe', 'pipe', 'inherit'] })
  let text = ''
  child.stdout!.setEncoding('utf8').on('data', chunk => {
    text += chunk
  })
  await once(child.stdout!, 'data')
  return async () => {
    child.stdin!.end()
    await new Promise(resolve => child.once('close', resolve))
    const times = JSON.parse(text) as Record<string, { ms: number, queued: number, at: number, status: number }[]>
    return Object.entries(times).map(([name, list]) => {
      const sorted = list.toSorted((a, b) => a.ms - b.ms)
      const own = list.map(({ ms, queued }) => ms - queued)
      const worst = Math.max(...own)
      return {
        name,
        count: list.length,
        median: sorted[Math.floor(sorted.length / 2)]?.ms ?? Infinity,
        p99: sorted[Math.floor(sorted.length * 0.99)]?.ms ?? Infinity,
        longest: sorted.at(-1)?.ms ?? Infinity,
        worst,
        worstAt: list[own.indexOf(worst)]?.at ?? 0,
        bad: list.filter(({ status }) => status !== 200).length
      }
    })
  }
}
