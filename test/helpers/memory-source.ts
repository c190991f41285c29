import type { ModelTable } from '../../src/model/architecture.ts'
import type { AnnouncedTensor, StoredSource, StreamedSource, Transport } from '../../src/contract/weight-source.ts'

export const MEMORY: Transport = { name: 'memory', readError: 'CHECKPOINT_FORMAT' }

/** Elements that share a factor of the checksum (docs/checksum.md). */
const GROUP = 8
const POWERS = Array.from({ length: GROUP }, (_, index) => wrap(0xD1342543DE82EF95n ** BigInt(index)))

const coded = new Map<string, Uint16Array>()
const checksums = new Map<string, string>()

/**
 * Position-coded bf16 bits of a whole tensor: finite values that depend on the checkpoint variant, the name and the
 * flat index.
 */
export function codedTensor (variant: number, name: string, count: number): Uint16Array {
  const key = `${variant} ${name} ${count}`
  let bits = coded.get(key)
  if (bits !== undefined) return bits
  let seed = (variant + 1) * 0x9E3779B1
  for (let i = 0; i < name.length; i++) seed = Math.imul(seed ^ name.charCodeAt(i), 0x01000193)
  bits = new Uint16Array(count)
  for (let index = 0; index < count; index++) {
    let h = Math.imul(seed ^ index, 0x85EBCA6B)
    h = Math.imul(h ^ (h >>> 13), 0xC2B2AE35)
    // The exponent stays below all ones: no infinities, no NaN.
    bits[index] = (h ^ (h >>> 16)) & 0xbfff
  }
  coded.set(key, bits)
  return bits
}

/** A source with `names` of the table and the coded values of `variant`, in one buffer, at odd offsets. */
export function memorySource (
  table: ModelTable,
  names: string[],
  variant: number,
  change: (tensor: AnnouncedTensor) => AnnouncedTensor = tensor => tensor
): StoredSource {
  const tensors: AnnouncedTensor[] = []
  const parts: Uint8Array[] = [new Uint8Array(1)]
  let bytes = 1
  for (const name of names) {
    const plan = table.tensors.get(name)!
    const bits = codedTensor(variant, name, plan.rows * plan.cols)
    tensors.push(change({ name, dtype: 'bfloat16', shape: plan.shape, source: 0, offset: bytes }))
    parts.push(new Uint8Array(bits.buffer), new Uint8Array(bits.length % 3))
    bytes += 2 * bits.length + bits.length % 3
  }
  return {
    kind: 'stored',
    transport: MEMORY,
    tensors,
    sources: [{ buffer: Buffer.concat(parts) }],
    verify: async () => {},
    close: async () => {}
  }
}

interface Breaks {
  after: number
  error: unknown
}

/** Bytes that a piece repeats of the one before it. */
const OVERLAP = 3

/** The same bytes piece by piece, cut at any place. Every piece is overwritten when the next one is requested. */
export function streamed (
  whole: StoredSource,
  cuts: readonly number[],
  breaks?: Breaks
): StreamedSource & { requested: () => number } {
  const { buffer } = whole.sources[0] as { buffer: Uint8Array }
  const ends = [...new Set(cuts.filter(cut => cut > OVERLAP && cut < buffer.length))].sort((a, b) => a - b).concat(
    buffer.length
  )
  let next = 0
  let last: Uint8Array | undefined
  const stop = (): void => {
    if (next === breaks?.after) throw breaks.error
  }
  const { tensors, verify, close } = whole
  return {
    kind: 'streamed',
    transport: MEMORY,
    tensors,
    verify,
    close,
    requested: () => next,
    stream: {
      ready: async () => {
        stop()
      },
      next: async () => {
        last?.fill(0xff)
        stop()
        if (next === ends.length) return undefined
        const begin = next === 0 ? 0 : ends[next - 1]! - OVERLAP
        last = Uint8Array.from(buffer.subarray(begin, ends[next++]))
        return { begin, length: last.length, source: { buffer: last } }
      }
    }
  }
}

/** An independent implementation of docs/checksum.md, over the coded values of one tensor. */
export function codedChecksum (table: ModelTable, name: string, variant: number): string {
  const plan = table.tensors.get(name)!
  const key = `${variant} ${name} ${plan.shape.join('x')}`
  let checksum = checksums.get(key)
  if (checksum !== undefined) return checksum
  const tensor = codedTensor(variant, name, plan.rows * plan.cols)
  let sum = 0n
  for (let begin = 0; begin < tensor.length; begin += GROUP) {
    let factor = wrap(BigInt(begin / GROUP + 1) * 0x9E3779B97F4A7C15n)
    factor = wrap((factor ^ (factor >> 30n)) * 0xBF58476D1CE4E5B9n)
    factor = wrap((factor ^ (factor >> 27n)) * 0x94D049BB133111EBn)
    factor = factor ^ (factor >> 31n) | 1n
    let group = 0n
    for (const [index, bits] of tensor.subarray(begin, begin + GROUP).entries()) group += BigInt(bits) * POWERS[index]!
    sum = wrap(sum + group * factor)
  }
  checksum = sum.toString(16).padStart(16, '0')
  checksums.set(key, checksum)
  return checksum
}

function wrap (value: bigint): bigint {
  return BigInt.asUintN(64, value)
}
