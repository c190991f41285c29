import { readdirSync, readlinkSync } from 'node:fs'
import assert from 'node:assert/strict'
import t from 'tap'
import type { Test } from 'tap'
import { native } from '../../src/native/load-addon.ts'
import { TensorReceiver } from '../../src/sources/tensor/tensor-receiver.ts'
import { cudaEntry, event, expandableBlob, segment, Sender, useStandIn } from '../helpers/cuda-tensors.ts'
import { sharedMemory, tensorEntry } from '../helpers/shared-tensors.ts'

// The handle thread may end because of a defect or lack of memory. Its files are then closed, and the next thread
// releases its references once.

useStandIn()

function receiverOf (t: Test): TensorReceiver {
  const receiver = new TensorReceiver({ ranks: 1, visible: native().cudaGpus().gpus, nearBytes: 0 })
  t.teardown(async () => {
    await receiver.close()
  })
  return receiver
}

/** Ends the thread by a request to release a value that is not a list. */
async function kill (receiver: TensorReceiver): Promise<void> {
  await receiver.discard(new Set(['no list']) as never)
}

const opened = (): number =>
  readdirSync('/proc/self/fd')
    .filter(fd => {
      try {
        return readlinkSync(`/proc/self/fd/${fd}`).startsWith('/dev/shm')
      } catch {
        return false
      }
    })
    .length

t.test('the files of a thread that ended are closed, and its references released once', async t => {
  const receiver = receiverOf(t)
  const file = sharedMemory(t, Buffer.alloc(8))
  const sender = new Sender(t)
  const block = segment(t, Buffer.alloc(2 << 20))
  const files = readdirSync('/proc/self/fd').map(fd => {
    try {
      return [Number(fd), readlinkSync(`/proc/self/fd/${fd}`)] as const
    } catch {
      return [-1, ''] as const
    }
  })
  const fd = files.find(([, path]) => path.includes(block.handle.toString('latin1').replaceAll('\0', '')))![0]
  const before = opened()
  const entry = cudaEntry([
    { name: 'a', shape: [4], memory: file },
    {
      name: 'b',
      shape: [4],
      blob: expandableBlob(3, process.pid, 2 << 20, [fd]),
      storageBytes: 8,
      share: sender.share()
    },
    {
      name: 'c',
      shape: [4],
      blob: Buffer.from(segment(t, Buffer.alloc(8)).handle),
      storageBytes: 8,
      share: sender.share(),
      event: event(t).handle
    }
  ])
  const source = await receiver.open({ entries: [entry], loadFormat: null })
  assert.ok(source.kind === 'stored')
  t.same(source.sources.map(source => Object.keys(source)[0]), ['fd', 'segment', 'segment'])
  t.ok(opened() > before + 2)
  await kill(receiver)
  t.equal(opened(), before + 2, 'the two files of the last segment')
  t.equal(file.count(), 2)
  t.equal(sender.held, 2, 'held until the update has ended')
  await t.rejects(source.verify(), { code: 'INTERNAL' })
  await t.rejects(source.look(), { code: 'INTERNAL' })
  await source.close()
  await source.close()
  t.equal(file.count(), 1)
  t.equal(sender.held, 0)
  t.equal(receiver.counts.filesOpened, receiver.counts.filesClosed)
})

t.test('requests behind the one at which the thread ends run on the next thread', async t => {
  const receiver = receiverOf(t)
  const files = [0, 1, 2].map(() => sharedMemory(t, Buffer.alloc(8)))
  const dying = kill(receiver)
  const entry = (index: number): string => tensorEntry([{ name: 'w', shape: [4], memory: files[index]! }])
  const [source] = await Promise.all([
    receiver.open({ entries: [entry(0)], loadFormat: null }),
    receiver.discard([entry(1)]),
    dying
  ])
  t.same(files.map(file => file.count()), [2, 1, 2])
  for (const open of [source, await receiver.open({ entries: [entry(2)], loadFormat: null })]) {
    await open.verify()
    await open.close()
  }
  t.same(files.map(file => file.count()), [1, 1, 1])
})

t.test('a receiver that closes waits for running reads, and closes the other sources', async t => {
  const receiver = receiverOf(t)
  const files = [0, 1].map(() => sharedMemory(t, Buffer.alloc(8)))
  const [read, waiting] = await Promise.all(
    files.map(async memory =>
      await receiver.open({ entries: [tensorEntry([{ name: 'w', shape: [4], memory }])], loadFormat: null })
    )
  )
  await read!.verify()
  let closed = false
  const closing = receiver.close().then(() => {
    closed = true
  })
  await new Promise(resolve => setTimeout(resolve, 50))
  t.notOk(closed)
  await t.rejects(waiting!.verify(), { code: 'ENGINE_CLOSED' })
  await read!.verify()
  t.same(files.map(file => file.count()), [2, 2])
  await read!.close()
  await closing
  await waiting!.close()
  t.same(files.map(file => file.count()), [1, 1])
})

t.test('without warmUp there is no thread before a body needs it', async t => {
  const threads = (): number => readdirSync('/proc/self/task').length
  const before = threads()
  for (const warmUp of [false, true]) {
    const receiver = new TensorReceiver({ ranks: 1, warmUp })
    receiver.start()
    t.equal(threads() > before, warmUp)
    await receiver.close()
  }
})
