import { messageOf, parsed, readAll } from '../remote/connection.ts'
import type { JsonReply } from '../remote/connection.ts'
import type { Worker } from './worker.ts'

/** Longest time of one load into an engine that joins. */
export const LOAD_MS = 120_000
/** Longest time of a call that moves no tensors. */
export const READ_MS = 5000

/** The version of an adapter that an engine holds. */
export interface HeldVersion {
  digest: string
  pinned: boolean
}

/** Null: the engine has no adapter of this name. A text: it cannot be read, and why. */
export async function readAdapter (
  { connection, url, facts }: Worker,
  name: string
): Promise<HeldVersion | null | string> {
  if (facts?.kind !== 'refit') return `${url} is no refit, which alone lets adapters be read`
  try {
    const reply = await connection.json('GET', `/adapters/${encodeURIComponent(name)}`, undefined, {
      signal: AbortSignal.timeout(READ_MS)
    })
    if (reply.status === 404) return null
    return reply.status < 400 ? reply.body as HeldVersion : `${url}: ${messageOf(reply)}`
  } catch (error) {
    return `${url}: ${(error as Error).message}`
  }
}

/**
 * Passes an adapter from one refit engine to another, piece by piece. Returns null, or the reason of the failure. The
 * bytes go through the gateway, so the engines need not reach each other and need no keys of each other.
 */
export async function copyAdapter (
  name: string,
  { pinned, digest }: HeldVersion,
  from: Worker,
  to: Worker
): Promise<string | null> {
  if (to.facts?.kind !== 'refit') return `${to.url} is no refit and loads adapters from folders alone`
  const signal = AbortSignal.timeout(LOAD_MS)
  const path = encodeURIComponent(name)
  try {
    const form = await from.connection.request({ method: 'GET', path: `/adapter_files/${path}`, signal, admin: true })
    if (form.statusCode >= 400) return `${from.url}: ${messageOf(await jsonOf(form))}`
    try {
      const { 'content-type': type, 'content-length': length } = form.headers
      const reply = await jsonOf(
        await to.connection.request({
          method: 'POST',
          path: `/adapters/${path}?pinned=${pinned}`,
          headers: { 'content-type': type, 'content-length': length },
          body: form.body,
          signal,
          admin: true
        })
      )
      if (reply.status >= 400) return messageOf(reply)
      const loaded = (reply.body as Partial<HeldVersion>).digest
      return loaded === digest ? null : `it holds digest ${loaded}, and ${from.url} has ${digest}`
    } finally {
      form.body.destroy()
    }
  } catch (error) {
    return (error as Error).message
  }
}

async function jsonOf (
  { statusCode: status, body }: { statusCode: number, body: AsyncIterable<Uint8Array> }
): Promise<JsonReply> {
  const text = String(await readAll(body))
  return { status, text, body: parsed(text) }
}
