import { createServer } from 'node:http'
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import type { Test } from 'tap'

/** One request that a scripted server received. */
export interface Asked {
  method: string
  path: string
  headers: IncomingMessage['headers']
  body: any
  reply: ServerResponse
}

/** A server on a free port that answers as the test writes it. Returns its URL. */
export async function scriptedServer (t: Test, answer: (asked: Asked) => unknown): Promise<string> {
  const server = createServer((request, reply) => {
    let text = ''
    request.setEncoding('utf8').on('data', part => {
      text += part
    })
    request.on('end', () => {
      const { method = '', url = '', headers } = request
      answer({ method, path: url, headers, body: text === '' ? null : JSON.parse(text), reply })
    })
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  t.teardown(() => {
    server.closeAllConnections()
    server.close()
  })
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`
}

export function event (data: object): string {
  return `data: ${JSON.stringify(data)}\n\n`
}

export const END = 'data: [DONE]\n\n'

/** An event of SGLang's /generate. */
export function sglangEvent (total: number, more: object = {}, index?: number): string {
  const meta = {
    completion_tokens: total,
    prompt_tokens: 7,
    cached_tokens: 2,
    weight_version: 'w1',
    finish_reason: null
  }
  return event({ text: '', output_ids: [], meta_info: { ...meta, ...more }, ...index === undefined ? {} : { index } })
}

/** Reply for the routes by which programs find out what a server is. */
export function json (reply: ServerResponse, status: number, body: unknown): void {
  reply.writeHead(status, { 'content-type': 'application/json' }).end(JSON.stringify(body))
}
