import { readFileSync } from 'node:fs'
import { createServer, get, Agent } from 'node:http'
import type { AddressInfo } from 'node:net'

// A process of its own: `node health-poller.js PID URL PID URL...` asks for /health of each server all the time, and of
// a server of its own, whose times tell how busy the machine is. It prints a line once all have replied, and the times
// as JSON when its standard input ends.

const EVERY_MS = 40
/** A request that is under way at the end is no failure before this. */
const SILENT_MS = 2000
const times: Record<string, { ms: number, queued: number, at: number, status: number }[]> = {}
/** The request under way, by name: when it began, and the milliseconds that threads had waited for a CPU. */
const begun: Record<string, { at: number, queued: number, pid: number }> = {}

const own = createServer((_request, reply) => reply.end('{}')).listen(0, '127.0.0.1', () => {
  const control = `http://127.0.0.1:${(own.address() as AddressInfo).port}`
  const servers: Array<[pid: number, url: string]> = [[process.pid, control]]
  for (let i = 2; i < process.argv.length; i += 2) servers.push([Number(process.argv[i]), process.argv[i + 1]!])
  let silent = servers.length
  const onFirst = (): void => {
    if (--silent === 0) process.stdout.write('\n')
  }
  for (const [pid, url] of servers) void poll(pid, url, url === control ? 'control' : url, onFirst)
})

async function poll (pid: number, url: string, name: string, onFirst: () => void): Promise<void> {
  const agent = new Agent({ keepAlive: true, maxSockets: 1 })
  const list = times[name] ??= []
  for (;;) {
    begun[name] = { at: performance.now(), queued: queuedMs(pid), pid }
    const status = await new Promise<number>(resolve => {
      get(`${url}/health`, { agent }, reply => {
        reply.resume().on('end', () => resolve(reply.statusCode!)).on('error', () => resolve(0))
      })
        .on('error', () => resolve(0))
    })
    list.push({ ...since(begun[name]), at: Date.now(), status })
    if (list.length === 1) onFirst()
    await new Promise(resolve => setTimeout(resolve, EVERY_MS))
  }
}

/** The time since a request began, and how long the server's main thread and this one could run and had no CPU. */
function since ({ at, queued, pid }: { at: number, queued: number, pid: number }): { ms: number, queued: number } {
  return { ms: performance.now() - at, queued: Math.max(0, queuedMs(pid) - queued) }
}

/** The scheduler's count for the main thread of a process and for this one. */
function queuedMs (pid: number): number {
  const pids = pid === process.pid ? [pid] : [pid, process.pid]
  return pids.reduce((sum, id) => sum + Number(schedstat(id).split(' ')[1]) / 1e6, 0)
}

/** "0 0 0" where the process has ended, or the kernel does not count. */
function schedstat (pid: number): string {
  try {
    return readFileSync(`/proc/${pid}/task/${pid}/schedstat`, 'utf8')
  } catch {
    return '0 0 0'
  }
}

process.stdin.resume().on('end', () => {
  // A request that has no reply counts as long as it has waited, once that is long.
  for (const [name, began] of Object.entries(begun)) {
    const waited = since(began)
    if (waited.ms > SILENT_MS) times[name]!.push({ ...waited, at: Date.now(), status: 0 })
  }
  process.stdout.write(JSON.stringify(times), () => process.exit(0))
})
