import { packTensorBody, unpackTensorBody } from '../../wire/torch/packed.ts'
import type { PackedTensorBody } from '../../wire/torch/packed.ts'
import { buffersOf } from './announced-columns.ts'
import type { FromHandleThread } from './handle-messages.ts'

type Opened = Extract<FromHandleThread, { type: 'opened' }>

/** A reply as it is posted between threads, with its body packed. */
export type PackedReply = Exclude<FromHandleThread, Opened> | Omit<Opened, 'body'> & { body: PackedTensorBody }

export function packReply (reply: FromHandleThread): { packed: PackedReply, transfer: ArrayBuffer[] } {
  if (reply.type !== 'opened' && reply.type !== 'announced') return { packed: reply, transfer: [] }
  const { handles, events } = reply.segments
  const segments = [handles.buffer, events.buffer]
  if (reply.type === 'announced') return { packed: reply, transfer: [...segments, ...buffersOf(reply.tensors)] }
  const body = packTensorBody(reply.body)
  return { packed: { ...reply, body }, transfer: [...segments, body.numbers.buffer, reply.sourceOf.buffer] }
}

export function unpackReply (packed: PackedReply): FromHandleThread {
  return packed.type === 'opened' ? { ...packed, body: unpackTensorBody(packed.body) } : packed
}
