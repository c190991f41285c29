import { packTensorBody, unpackTensorBody } from '../wire/torch-packed.ts'
import type { PackedTensorBody } from '../wire/torch-packed.ts'
import type { FromShares } from './share-messages.ts'

type Opened = Extract<FromShares, { type: 'opened' }>

/** A reply on its way between threads: bodies are packed. */
export type PackedReply = Exclude<FromShares, Opened> | Omit<Opened, 'body' | 'spares'> & { body: PackedTensorBody, spares: PackedTensorBody | null }

export function packReply (reply: FromShares): { packed: PackedReply, transfer: ArrayBuffer[] } {
  if (reply.type !== 'opened') return { packed: reply, transfer: [] }
  const { segments, sourceOf } = reply
  const body = packTensorBody(reply.body)
  const spares = reply.spares === null ? null : packTensorBody(reply.spares)
  return { packed: { ...reply, body, spares }, transfer: [body.numbers.buffer, segments.handles.buffer, segments.events.buffer, sourceOf.buffer] }
}

export function unpackReply (packed: PackedReply): FromShares {
  if (packed.type !== 'opened') return packed
  return { ...packed, body: unpackTensorBody(packed.body), spares: packed.spares === null ? null : unpackTensorBody(packed.spares) }
}
