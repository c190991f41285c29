import { parentPort } from 'node:worker_threads'
import { RefitError } from '../errors.ts'
import { native } from '../native.ts'
import { readTensorBody } from '../wire/torch-body.ts'
import type { TensorBody } from '../wire/torch-body.ts'
import { packTensorBody } from '../wire/torch-packed.ts'
import { readShares } from '../wire/torch-shares.ts'
import { payloadError } from '../wire/torch-tensor.ts'
import type { FromShares, ToShares } from './share-messages.ts'
import { TensorShares } from './tensor-shares.ts'
import { warmUp } from './warm-up.ts'

// The thread of the shares: it decodes what trainers post, opens the memory that it names, and gives the references back. A body
// of 20,000 handles takes a long time to read, and as many files a long time to open: neither may hold up the event loop. The
// descriptors that it opens are the process's; they are closed when it ends, however it ends.

type Open = Extract<ToShares, { type: 'open' }>

const port = parentPort!
const addon = native()
const open = new Map<number, TensorShares>()

function post (message: FromShares, transfer: ArrayBuffer[] = []): void {
  port.postMessage(message, transfer)
}

port.on('message', (message: ToShares) => {
  switch (message.type) {
    case 'open': return receive(message)
    case 'release': {
      const released = open.get(message.id)?.release() ?? { shares: 0, files: 0 }
      open.delete(message.id)
      return post({ type: 'released', id: message.id, released })
    }
    case 'discard': return post({ type: 'released', id: message.id, released: discard(message.entries) })
    case 'end':
      for (const shares of open.values()) shares.release()
      port.close()
  }
})

function receive (message: Open): void {
  let body: TensorBody | undefined
  let shares: TensorShares | undefined
  try {
    body = readTensorBody(message)
    shares = new TensorShares(body.storages, addon)
    shares.open(message.device)
    const { fds, fileOf } = shares.opened
    const packed = packTensorBody(body)
    post({ type: 'opened', id: message.id, body: packed, fds, fileOf }, [packed.numbers.buffer, fileOf.buffer])
    open.set(message.id, shares)
    discardRest(message)
  } catch (error) {
    const { code, message: text, param } = toRefusal(error, body)
    // What could not be read shares nothing.
    const released = shares?.release() ?? discard(message.entries)
    if (shares !== undefined) discardRest(message)
    post({ type: 'refused', id: message.id, code, message: text, param, released })
  }
}

/** Entries beyond the ranks are not read, but were shared like the others. */
function discardRest ({ entries, ranks }: Open): void {
  if (entries.length <= Math.max(ranks, 1) || entries.length === 1) return
  const read = new Set(entries.slice(0, ranks))
  discard(entries.slice(ranks).filter(entry => !read.has(entry)))
}

function discard (entries: readonly string[]) {
  return new TensorShares(readShares(entries), addon).release()
}

/** Names the tensor that lies in the storage at fault. */
function toRefusal (error: unknown, body: TensorBody | undefined): RefitError {
  if (!(error instanceof RefitError)) return new RefitError('INTERNAL', `the payload could not be read: ${error instanceof Error ? error.message : String(error)}`)
  const tensor = error.cause === undefined ? undefined : body?.ranks.flat().find(({ storage }) => storage === error.cause)
  if (tensor === undefined) return error
  const { message, param } = payloadError(error.message, tensor.name)
  return new RefitError(error.code, message, param === undefined ? {} : { param })
}

warmUp()
