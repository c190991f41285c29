import { createServer as createHttpServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import type { Test } from 'tap'

/**
 * An engine of SGLang's dialect that records the requests it gets. Groups on GPUs cannot run here, so the test only
 * checks the requests.
 */
export async function recorder (
  t: Test,
  ranks: number,
  replies: Readonly<Record<string, object>> = {}
): Promise<{ url: string, bodies: Record<string, any> }> {
  const bodies: Record<string, any> = {}
  const server = createHttpServer((request, response) => {
    const chunks: Buffer[] = []
    request.on('data', chunk => chunks.push(chunk))
    request.on('end', () => {
      if (request.method === 'POST') bodies[request.url!] = JSON.parse(String(Buffer.concat(chunks)) || '{}')
      const answers: Record<string, object> = {
        '/server_info': { tp_size: ranks, pp_size: 1 },
        '/model_info': { model_path: '/m', weight_version: 'default' },
        '/weights_checker': { success: true, per_engine_checksum: 'same' },
        '/capabilities': { server: 'other' },
        ...replies
      }
      response.setHeader('content-type', 'application/json')
      response.end(JSON.stringify(answers[request.url!] ?? { success: true, message: 'ok' }))
    })
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  t.teardown(() => {
    server.closeAllConnections()
    server.close()
  })
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, bodies }
}
