import { createServer, get, Agent } from 'node:http'
import type { AddressInfo } from 'node:net'

// A process of its own: `node health-poller.js URL...` asks for /health of each server all the time, and of a server of
// its own, whose times tell how busy the machine is. It prints the times as JSON when its standard input ends.

const EVERY_MS = 40
const times: Record<string, { ms: number, at: number, status: number }[]> = {}
/** When the request under way began, by name. */
const begun: Record<string, number> = {}

const own = createServer((_request, reply) => reply.end('{}')).listen(0, '127.0.0.1', () => {
  const control = `http://127.0.0.1:${(own.address() as AddressInfo).port}`
  for (const url of [control, ...process.argv.slice(2)]) void poll(url, url === control ? 'control' : url)
})

async function poll (url: string, name: string): Promise<void> {
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
