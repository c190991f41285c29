import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { packageRoot } from '../../src/root.ts'
import type { IpcHandle } from '../../src/wire/torch/ipc-handle.ts'
import type { TensorRequestBody } from '../../src/wire/torch/body.ts'
import type { TensorStorage } from '../../src/wire/torch/tensor.ts'

// Pickles that Python recorded (test/fixtures/pickles/make_pickles.py), and helpers that write others by hand.

export interface PayloadCase {
  name: string
  entries: string[]
  load_format: string | null
  ranks: number
  /** UUIDs of the ranks' GPUs. */
  gpus: string[]
  any_dtype: boolean
  expected: { ranks: object[][], storages: object[], spares: object[] }
}
export interface RefusedCase {
  name: string
  entries: string[]
  load_format: string | null
  ranks: number
  gpus: string[]
  code: string
  says: string
}
export interface ValueCase {
  name: string
  pickle: string
  value: unknown
}
export interface ExploitCase {
  name: string
  pickle: string
  refused: string
}

interface Recorded {
  payloads: PayloadCase
  refused: RefusedCase
  values: ValueCase
  exploits: ExploitCase
}

export function recordedPickles<K extends keyof Recorded> (kind: K): Array<Recorded[K]> {
  return JSON.parse(readFileSync(join(packageRoot, 'test/fixtures/pickles', `${kind}.json`), 'utf8')) as Array<
    Recorded[K]
  >
}

export { assemble, bin, global, PROTO4, str, u32, u64 } from '../../src/conformance/transports/pickle-writer.ts'

/** A body in the form of `PayloadCase.expected`: storages by number, bytes in hex. */
export function describeBody ({ ranks, storages, spares }: TensorRequestBody): PayloadCase['expected'] {
  return {
    ranks: ranks.map(tensors => tensors.map(tensor => ({ ...tensor, storage: storages.indexOf(tensor.storage) }))),
    storages: storages.map(describeStorage),
    spares: spares.map(describeStorage)
  }
}

export function describeStorage (storage: TensorStorage): object {
  if (storage.kind !== 'cuda') return storage
  return {
    ...storage,
    handle: describeHandle(storage.handle),
    event: storage.event === null ? null : hex(storage.event)
  }
}

function describeHandle ({ key, ...handle }: IpcHandle): object {
  return handle.type === 'device' ? { ...handle, blob: hex(key) } : { ...handle, fabric: handle.fabric.map(hex) }
}

function hex (latin1: string): string {
  return Buffer.from(latin1, 'latin1').toString('hex')
}
