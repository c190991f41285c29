import { createServer } from 'node:http'
import type { IncomingMessage, RequestListener } from 'node:http'
import type { AddressInfo } from 'node:net'
import type { Test } from 'tap'

export interface ScriptedEngine {
  url: string
  port: number
  /**
   * Behaviour by path, without the query; a test may change it at any time. Bodies are read first, except for paths in
   * `early`.
   */
  on: Record<string, RequestListener>
  early: Set<string>
  /** Number of requests, by path. */
  calls: Record<string, number>
  /** Number of open connections. */
  connections: () => Promise<number>
  /** Accepts no new connections; calls under way stay. */
  stopListening: () => void
  /** As if the process died. */
  kill: () => Promise<void>
}

const ANSWERS: Readonly<Record<'sglang' | 'vllm', Readonly<Record<string, object>>>> = {
  sglang: {
    '/capabilities': { server: 'other' },
    '/server_info': { tp_size: 1, pp_size: 1 },
    '/model_info': { model_path: '/m', weight_version: 'default' },
    '/weights_checker': { success: true, per_engine_checksum: 'same' }
  },
  vllm: {
    '/capabilities': {},
    '/server_info': {},
    '/version': { version: '0.20.0' },
    '/get_world_size': { world_size: 1 },
    '/v1/models': { data: [{ id: 'm', root: '/m' }] }
  }
}

/** An engine that implements as much of a dialect as a gateway checks, and otherwise follows the test's script. */
export async function scriptedEngine (
  t: Test,
  { dialect = 'sglang', port = 0, on = {} }: {
    dialect?: 'sglang' | 'vllm'
    port?: number
    on?: Record<string, RequestListener>
  } = {}
): Promise<ScriptedEngine> {
  const calls: Record<string, number> = {}
  const early = new Set<string>()
  const server = createServer((request, response) => {
    const path = request.url!.split('?', 1)[0]!
    calls[path] = (calls[path] ?? 0) + 1
    const answer = (): void => {
      ;(on[path] ?? says(ANSWERS[dialect][path] ?? { success: true, message: 'ok' }))(request, response)
    }
    if (early.has(path)) answer()
    else request.resume().on('end', answer).on('error', () => {})
  })
  await new Promise<void>(resolve => server.listen(port, '127.0.0.1', resolve))
  const kill = async (): Promise<void> => {
    server.closeAllConnections()
    await new Promise(resolve => server.close(resolve))
  }
  t.teardown(kill)
  const { port: taken } = server.address() as AddressInfo
  return {
    url: `http://127.0.0.1:${taken}`,
    port: taken,
    on,
    early,
    calls,
    connections: async () =>
      await new Promise((resolve, reject) =>
        server.getConnections((error, count) => {
          error === null ? resolve(count) : reject(error)
        })
      ),
    stopListening: () => {
      server.close()
    },
    kill
  }
}

export function says (body: object, status = 200): RequestListener {
  return (_request, response) => {
    response.writeHead(status, { 'content-type': 'application/json' }).end(JSON.stringify(body))
  }
}

/** Accepts the call and never replies. */
export const hangs: RequestListener = () => {}

/** Accepts the call and loses the reply. */
export function loses (request: IncomingMessage): void {
  request.socket.destroy()
}
