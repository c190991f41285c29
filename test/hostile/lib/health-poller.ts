import { createServer, get, Agent } from 'node:http'
import type { AddressInfo } from 'node:net'

// A process of its own: `node health-poller.js URL...` asks for /health of each server all the time, and of a server of
// its own, whose times tell how busy the machine is. It prints a line once all have replied, and the times as JSON when
// its standard input ends.

const EVERY_MS = 40
const times: Record<string, { ms: number, at: number, status: number }[]> = {}
/** When the request under way began, by name. */
const begun: Record<string, number> = {}

const own = createServer((_request, reply) => reply.end('{}')).listen(0, '127.0.0.1', () => {
  const control = `http://127.0.0.1:${(own.address() as AddressInfo).port}`
  const urls = [control, ...process.argv.slice(2)]
  let silent = urls.length
  const onFirst = (): void => {
    if (--silent === 0) process.stdout.write('\n')
  }
  for (const url of urls) void poll(url, url === control ? 'control' : url, onFirst)
})

async function poll (url: string, name: string, onFirst: () => void): Promise<void> {
  const agent = new Agent({ keepAlive: true, maxSockets: 1 })
  const list = times[name] ??= []
  for (;;) {
    const began = begun[name] = performance.now()
    const status = await new Promise<number>(resolve => {
      get(`${url}/health`, { agent }, reply => {
        reply.resume().on('end', () => resolve(reply.statusCode!)).on('error', () => resolve(0))
      })
        .on('error', () => resolve(0))
    })
    list.push({ ms: performance.now() - began, at: Date.now(), status })
    if (list.length === 1) onFirst()
    await new Promise(resolve => setTimeout(resolve, EVERY_MS))
  }
}

process.stdin.resume().on('end', () => {
  // A request that has no reply counts as long as it has waited.
  for (const [name, began] of Object.entries(begun)) {
    const ms = performance.now() - began
    if (ms > Math.max(...times[name]!.map(time => time.ms))) times[name]!.push({ ms, at: Date.now(), status: 0 })
  }
  process.stdout.write(JSON.stringify(times), () => process.exit(0))
})
