import { createHash } from 'node:crypto'
import { RefitError } from '../errors.ts'
import { bytesOf } from '../native/dtypes.ts'
import type { HeldDType } from '../native/dtypes.ts'
import type { PlannedModule } from './plan-adapter.ts'
import { SentTensor } from './sent-tensor.ts'

// Broadcasts arrive in slots, so what was sent is put together again from there.

/** SHA-256 of the tensors' bytes as they were sent, as hex digits by name. */
export type ExpectedChecksums = Readonly<Record<string, string>>

/**
 * Throws ADAPTER_REFUSED if a slot does not hold all bits of what is sent. `dtype` is the slot's; bfloat16 in float32
 * loses nothing.
 */
export function requireComparable (
  modules: readonly PlannedModule[],
  dtype: HeldDType,
  expected: ExpectedChecksums
): void {
  const read = new Set<string>()
  for (const { name, dtype: sent } of modules.flatMap(({ a, b }) => [a, b])) {
    read.add(name)
    if (sent === dtype || (sent === 'bfloat16' && dtype === 'float32')) continue
    throw refuse(name, `cannot be checked: it is sent as ${sent}, and this engine holds ${dtype}; send that`)
  }
  const unread = Object.keys(expected).find(name => !read.has(name))
  if (unread !== undefined) throw refuse(unread, 'cannot be checked: the engine does not hold it; leave it out')
}

/** Throws ADAPTER_REFUSED for a difference. `tensors`: A and B of each module as SlotMemory.tensors reads them. */
export async function compareReceived (
  modules: readonly PlannedModule[],
  tensors: AsyncIterable<Uint8Array>,
  dtype: HeldDType,
  expected: ExpectedChecksums
): Promise<void> {
  const halves = modules.flatMap(({ a, b }) => [a, b])
  const sent = new Map<string, SentTensor>()
  for (const half of halves) {
    const tensor = sent.get(half.name) ?? new SentTensor()
    tensor.expect(half)
    sent.set(half.name, tensor)
  }
  let index = 0
  for await (const held of tensors) {
    const half = halves[index++]!
    const { name } = half
    const bytes = sent.get(name)!.put(half, half.dtype === dtype ? held : upperHalves(held))
    if (bytes === null) continue
    sent.delete(name)
    const wanted = expected[name]!
    const sum = createHash('sha256').update(bytes).digest('hex')
    if (sum !== wanted.toLowerCase()) throw refuse(name, `is ${wanted.slice(0, 80)}, and the bytes have ${sum}`)
  }
}

/** bfloat16 values of float32 values that came from such. */
function upperHalves (bytes: Uint8Array): Uint8Array {
  const floats = new Uint32Array(bytes.buffer as ArrayBuffer, bytes.byteOffset, bytes.length / bytesOf('float32'))
  return new Uint8Array(Uint16Array.from(floats, bits => bits >>> 16).buffer)
}

function refuse (name: string, why: string): RefitError {
  return new RefitError(
    'ADAPTER_REFUSED',
    `expected_checksums ${why}: ${JSON.stringify(name.slice(0, 200))}. Nothing has changed`,
    { param: 'expected_checksums' }
  )
}
