import { parentPort, workerData } from 'node:worker_threads'
import { RefitError } from '../errors.ts'
import { native } from '../native.ts'
import { readTensorBody } from '../wire/torch-body.ts'
import type { TensorRequestBody } from '../wire/torch-body.ts'
import { packTensorBody, unpackTensorBody } from '../wire/torch-packed.ts'
import { readPlain } from '../wire/torch-plain.ts'
import type { PlainValue } from '../wire/torch-plain.ts'
import { readShares } from '../wire/torch-shares.ts'
import { payloadError } from '../wire/torch-tensor.ts'
import type { FromShares, ShareThreadData, ToShares } from './share-messages.ts'
import { TensorShares } from './tensor-shares.ts'
import type { RequestShares, ShareCounts } from './tensor-shares.ts'
import { VisibleCards } from './visible-cards.ts'
import { warmUp } from './warm-up.ts'

// The thread of the shares: it decodes what trainers post, opens the memory that it names, and gives the references back. A body
// of 20,000 handles takes a long time to read, and as many files a long time to open: neither may hold up the event loop. The
// files that it opens are closed when it ends, however it ends; of what else it holds the main thread takes care (ShareThread).

type Open = Extract<ToShares, { type: 'open' }>
type Unpickle = Extract<ToShares, { type: 'unpickle' }>

const port = parentPort!
const addon = native()
const { onCards } = workerData as ShareThreadData
const cards = onCards ? new VisibleCards(addon) : null
const open = new Map<number, TensorShares>()

function post (message: FromShares, transfer: ArrayBuffer[] = []): void {
  port.postMessage(message, transfer)
}

port.on('message', (message: ToShares) => {
  switch (message.type) {
    case 'open':
    case 'unpickle': return receive(message)
    case 'release': {
      const released = open.get(message.of)?.release() ?? { shares: 0, files: 0 }
      open.delete(message.of)
      return post({ type: 'released', id: message.id, released })
    }
    case 'look': return post({ type: 'looked', id: message.id, gone: open.get(message.of)?.findGone() ?? null })
    case 'discard': return post({ type: 'released', id: message.id, released: giveBack({ storages: readShares(message.entries) }) })
    case 'drop': return post({ type: 'released', id: message.id, released: giveBack(unpackTensorBody(message.body)) })
    case 'end':
      for (const shares of open.values()) shares.release()
      port.close()
  }
})

function receive (message: Open | Unpickle): void {
  let body: TensorRequestBody | undefined
  let shares: TensorShares | undefined
  try {
    const read = decode(message)
    body = read.body
    shares = new TensorShares(body, addon, cards)
    const { fds, segments, sourceOf } = shares.open()
    const packed = packTensorBody(body)
    const spares = body.spares.length === 0 ? null : packTensorBody({ ranks: [], storages: body.spares })
    post({ type: 'opened', id: message.id, body: packed, spares, fds, segments, taken: shares.taken, sourceOf, value: read.value }, [packed.numbers.buffer, segments.handles.buffer, segments.events.buffer, sourceOf.buffer])
    open.set(message.id, shares)
    discardRest(message)
  } catch (error) {
    const { code, message: text, param } = toRefusal(error, body)
    // What could not be read shares nothing.
    const released = shares?.release() ?? giveBack({ storages: message.type === 'open' ? readShares(message.entries) : readShares([message.bytes]) })
    if (shares !== undefined) discardRest(message)
    post({ type: 'refused', id: message.id, code, message: text, param, released, taken: shares?.taken ?? [] })
  }
}

function decode (message: Open | Unpickle): { body: TensorRequestBody, value: PlainValue } {
  if (message.type === 'open') return { body: readTensorBody(message, message), value: null }
  const { value, ...body } = readPlain(message.bytes, message.classes, message.ranks, message.cards)
  return { body, value }
}

/** Entries beyond the ranks are not read, but were shared like the others. */
function discardRest (message: Open | Unpickle): void {
  if (message.type !== 'open') return
  const { entries, ranks } = message
  if (entries.length <= Math.max(ranks, 1) || entries.length === 1) return
  const read = new Set(entries.slice(0, ranks))
  giveBack({ storages: readShares(entries.slice(ranks).filter(entry => !read.has(entry))) })
}

function giveBack (shares: RequestShares): ShareCounts {
  return new TensorShares(shares, addon, cards).release()
}

/** Names the tensor that lies in the storage at fault. */
function toRefusal (error: unknown, body: TensorRequestBody | undefined): RefitError {
  if (!(error instanceof RefitError)) return new RefitError('INTERNAL', `the payload could not be read: ${error instanceof Error ? error.message : String(error)}`)
  const tensor = error.cause === undefined ? undefined : body?.ranks.flat().find(({ storage }) => storage === error.cause)
  if (tensor === undefined) return error
  const { message, param } = payloadError(error.message, tensor.name)
  return new RefitError(error.code, message, param === undefined ? {} : { param })
}

warmUp()
cards?.load()
