import { existsSync, rmdirSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { transportsNamed } from '../context.ts'
import type { Context } from '../context.ts'
import { definePromise, expect } from '../promise.ts'
import { assemble, global, PROTO4, str, tensorEntry } from '../transports/pickle-writer.ts'
import type { BucketPiece, SharedTensor } from '../transports/pickle-writer.ts'
import type { BucketTransport, Shared, TensorTransport } from '../transports/tensor.ts'

const GROUP = 'payloads'
const POLL_MS = 50

/** A promise that handles of shared memory with a lie in the last one are refused. */
function lyingHandle (
  id: string,
  title: string,
  change: (tensor: Shared) => SharedTensor
): ReturnType<typeof definePromise> {
  return definePromise(GROUP, id, {
    title,
    ways: transportsNamed('tensor'),
    check: async (context, transport: TensorTransport) =>
      await transport.withMemory(context.variants.B.tensors, async shared => {
        const last = shared.at(-1)!
        const lies = [...shared.slice(0, -1), change(last)]
        const reply = await transport.post(lies, tensorEntry, null, { label: context.newLabel() })
        return await context.expectRefusal(reply, `an update with a false handle of ${last.name}`)
      })
  })
}

export const noMemory = lyingHandle(
  'no-memory',
  'A handle of shared memory that does not exist is refused, and nothing of the update is written.',
  tensor => ({ ...tensor, memory: { name: '/torch_1_1_1', bytes: tensor.memory.bytes } })
)

export const shortMemory = lyingHandle(
  'short-memory',
  'A handle of shared memory that is shorter than it says is refused, and nothing of the update is written.',
  tensor => {
    const { name, bytes } = tensor.memory
    tensor.memory.truncate(bytes >> 1)
    return { ...tensor, memory: { name, bytes } }
  }
)

export const pastEnd = lyingHandle(
  'past-end',
  'A tensor that reaches past the end of its memory is refused, and nothing of the update is written.',
  tensor => ({ ...tensor, offset: 1 })
)

/** A promise that a pickle is refused. */
function badPickle (id: string, title: string, entry: () => string): ReturnType<typeof definePromise> {
  return definePromise(GROUP, id, {
    title,
    ways: transportsNamed('tensor'),
    check: async (context, transport: TensorTransport) => {
      const reply = await transport.postEntries([entry()], null, { label: context.newLabel() })
      return await context.expectRefusal(reply, 'a bad pickle')
    }
  })
}

export const noPickle = badPickle(
  'no-pickle',
  'A payload that is no pickle is refused, and the server lives.',
  () => Buffer.from('weights of the conformance suite').toString('base64')
)

export const cutPickle = badPickle(
  'cut-pickle',
  'A pickle that is cut off is refused, and the server lives.',
  () => assemble(PROTO4, ']', '(', str('model.norm.weight')).toString('base64')
)

export const runsNothing = definePromise(GROUP, 'runs-nothing', {
  title: 'A pickle that calls a function of the system is refused, and the function does not run.',
  ways: transportsNamed('tensor'),
  check: async (context, transport: TensorTransport) => {
    const folder = join(tmpdir(), `refit-conformance-ran-${process.pid}`)
    const call = assemble(PROTO4, ']', global('os', 'mkdir'), str(folder), '\x85R', 'a.')
    const reply = await transport.postEntries([call.toString('base64')], null)
    const hasRun = existsSync(folder)
    if (hasRun) rmdirSync(folder)
    expect(!hasRun, 'os.mkdir ran on the server')
    return await context.expectRefusal(reply, 'a pickle that calls os.mkdir')
  }
})

/** A promise that a bucket with a lie in the place of its last tensor is refused. */
function lyingBucket (
  id: string,
  title: string,
  change: (piece: BucketPiece) => BucketPiece
): ReturnType<typeof definePromise> {
  return definePromise(GROUP, id, {
    title,
    ways: transportsNamed('bucket'),
    check: async (context, transport: BucketTransport) => {
      const reply = await transport.sendPieces(
        context.variants.B.tensors,
        pieces => [...pieces.slice(0, -1), change(pieces.at(-1)!)],
        { label: context.newLabel() }
      )
      return await context.expectRefusal(reply, 'a bucket with a false place')
    }
  })
}

export const beyondBucket = lyingBucket(
  'beyond-bucket',
  'A bucket whose last tensor ends after the bucket is refused, and nothing of it is written.',
  ({ start, end, ...piece }) => ({ ...piece, start: start + 2, end: end + 2 })
)

export const shortPlace = lyingBucket(
  'short-place',
  'A bucket whose last tensor has fewer bytes than its shape is refused, and nothing of it is written.',
  ({ end, ...piece }) => ({ ...piece, end: end - 2 })
)

export const memoryReturned = definePromise(GROUP, 'memory-returned', {
  title: "After the reply, the server has given back its references to the sender's memory.",
  ways: transportsNamed('tensor'),
  check: async (context, transport: TensorTransport) => {
    await expectReturned(context, transport, 'an update', name => name)
    await expectReturned(context, transport, 'a refused update', name => `${name}.conformance`)
    return 'after an update and after a refused one'
  }
})

async function expectReturned (
  context: Context,
  transport: TensorTransport,
  what: string,
  rename: (name: string) => string
): Promise<void> {
  await transport.withMemory(context.variants.B.tensors.slice(0, 4), async shared => {
    await transport.post(shared.map(tensor => ({ ...tensor, name: rename(tensor.name) })), tensorEntry, null)
    const end = performance.now() + Math.min(context.server.target.patienceMs, 5000)
    const isHeld = (): boolean => shared.some(({ memory }) => memory.count() !== 1)
    while (isHeld() && performance.now() < end) await new Promise(resolve => setTimeout(resolve, POLL_MS))
    const counts = shared.map(({ memory }) => memory.count() - 1).join(', ')
    expect(!isHeld(), `after ${what} these references were left: ${counts}`)
  })
}
