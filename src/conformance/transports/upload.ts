import { request } from 'node:http'
import type { ClientRequest, IncomingMessage } from 'node:http'
import { request as requestTls } from 'node:https'
import type { Tensor } from '../checkpoint.ts'
import { NoReply, readReply } from '../http-target.ts'
import type { HttpTarget, Reply } from '../http-target.ts'
import { safetensorsHeader } from '../variants.ts'
import type { HeldUpdate, SendOptions, Transport } from './transport.ts'

const ROUTE = '/update_weights_from_tensor'

/** A safetensors file as the body of the request, which refit takes. */
export class UploadTransport implements Transport {
  readonly name = 'upload'
  missing?: string
  readonly takesParts = false
  readonly #target: HttpTarget

  constructor (target: HttpTarget) {
    this.#target = target
  }

  async send (tensors: readonly Tensor[], options: SendOptions = {}): Promise<Reply> {
    return await this.sendBytes(
      Buffer.concat([safetensorsHeader(tensors), ...tensors.map(({ bytes }) => bytes())]),
      options
    )
  }

  async sendBytes (bytes: Uint8Array, { label }: SendOptions = {}): Promise<Reply> {
    return await this.#target.post(ROUTE + query(label), undefined, { bytes })
  }

  /** Sends the header at once and each tensor when it is released, under the length of the whole file. */
  async hold (tensors: readonly Tensor[], { label }: SendOptions = {}): Promise<HeldUpdate> {
    const target = this.#target
    const header = safetensorsHeader(tensors)
    const pieces = tensors.map(({ bytes }) => bytes())
    const length = pieces.reduce((sum, { length }) => sum + length, header.length)
    const url = new URL(target.path(ROUTE + query(label)), target.url)
    const headers = { 'content-type': 'application/octet-stream', 'content-length': length, ...target.auth(true) }
    const sending = (url.protocol === 'https:' ? requestTls : request)(url, { method: 'POST', headers, agent: false })
    const reply = replyOf(sending, target.patienceMs)
    await write(sending, header)
    let sent = 0
    return {
      release: async count => {
        for (const piece of pieces.slice(sent, sent += count)) await write(sending, piece)
        if (sent >= pieces.length) sending.end()
      },
      kill: async () => {
        sending.destroy()
      },
      reply
    }
  }

  async close (): Promise<void> {}
}

function query (label: string | undefined): string {
  return label === undefined ? '' : `?weight_version=${encodeURIComponent(label)}`
}

async function write (sending: ClientRequest, bytes: Buffer): Promise<void> {
  await new Promise<void>(resolve => {
    if (sending.destroyed) return resolve()
    sending.once('close', resolve)
    sending.write(bytes, () => {
      sending.off('close', resolve)
      resolve()
    })
  })
}

function replyOf (sending: ClientRequest, patienceMs: number): Promise<Reply> {
  const reply = new Promise<Reply>((resolve, reject) => {
    const lost = (why: string): void => reject(new NoReply(`POST ${ROUTE} lost its connection: ${why}`))
    sending.setTimeout(patienceMs, () => sending.destroy(new Error(`no answer within ${patienceMs / 1000} s`)))
    sending.on('error', error => lost(error.message))
    sending.on('close', () => lost('closed without an answer'))
    sending.on('response', (response: IncomingMessage) => {
      const chunks: Buffer[] = []
      response.on('data', chunk => chunks.push(chunk))
      response.on('end', () => resolve(readReply(response.statusCode!, Buffer.concat(chunks).toString())))
    })
  })
  // A caller that kills the sender may not look at the reply.
  reply.catch(() => {})
  return reply
}
