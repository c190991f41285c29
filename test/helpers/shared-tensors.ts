import type { Test } from 'tap'
import { SharedMemory } from '../../src/conformance/transports/shared-memory.ts'

export { contiguous, int, pickledTensor, tensorEntry, tuple } from '../../src/conformance/transports/pickle-writer.ts'
export type { SharedTensor } from '../../src/conformance/transports/pickle-writer.ts'
export type { SharedMemory }

/** A file of shared memory with `count` references, the sender's own included. */
export function sharedMemory (t: Test, data: Uint8Array, count = 2): SharedMemory {
  const memory = new SharedMemory(data, count)
  t.teardown(() => {
    memory.close()
  })
  return memory
}
