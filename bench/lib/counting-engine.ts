import { createServer } from 'node:http'
import type { ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'

// A stand-in for an engine on a machine of its own, for bench/gateway.ts. It describes itself as refit does, counts the
// bytes of an update, and then waits without using a processor, like copies on GPUs.
// usage: node counting-engine.js MILLISECONDS

const WORK_MS = Number(process.argv[2])
let version = 'default'

const server = createServer((request, response) => {
  const path = request.url!.split('?', 1)[0]!
  let bytes = 0
  request.on('data', (chunk: Buffer) => {
    bytes += chunk.length
  })
  request.on('end', () => {
    if (path === '/capabilities') return answer(response, { server: 'refit', dialects: ['sglang'] })
    if (path === '/server_info') {
      return answer(response, {
        tp_size: 1,
        weight_version: version,
        weights: 'current',
        started_at: 1,
        model_path: '/m'
      })
    }
    if (path === '/weights_checker') return answer(response, { success: true, checksums: { a: version } })
    if (!path.startsWith('/update_weights')) return answer(response, { status: 'ok' })
    version = new URL(request.url!, 'http://h').searchParams.get('v') ?? version
    setTimeout(() => {
      answer(response, { success: true, message: 'ok', bytes })
    }, WORK_MS)
  })
})

function answer (response: ServerResponse, body: object): void {
  const text = JSON.stringify(body)
  response.writeHead(200, { 'content-type': 'application/json', 'content-length': Buffer.byteLength(text) }).end(text)
}

server.listen(0, '127.0.0.1', () => {
  console.log(`is ready on http://127.0.0.1:${(server.address() as AddressInfo).port}"`)
})
