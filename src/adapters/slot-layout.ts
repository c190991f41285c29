import { createHash } from 'node:crypto'
import type { StoredSource } from '../contract/weight-source.ts'
import { bytesOf, DTYPES } from '../native/dtypes.ts'
import { RECT, RECT_FIELDS, TENSOR, TENSOR_FIELDS } from '../native/write-layout.ts'
import type { WriteJob } from '../native/write-job.ts'
import { packSums } from '../weights/checksum.ts'
import type { PackedSums } from '../weights/checksum.ts'
import type { PlannedModule } from './plan-adapter.ts'

type Module = Pick<PlannedModule, 'module' | 'rank' | 'scale'>

/** The places of an adapter in a slot. They follow from its modules, whatever the places of its tensors are. */
export interface SlotLayout {
  /** A and B of each module in turn, as in `WriteJob.rects`. */
  rects: Float64Array
  /** Checksums of the same, in the same order. */
  sums: PackedSums
  /** The modules in the order of their lines in the digest: a line without its checksums, and the number of A. */
  lines: ReadonlyArray<{ head: string, a: number }>
  /** The last whole job of a slot that had nothing to clear. */
  last?: WholeJob
}

/** A job that writes a slot's ranks, scales and tensors. */
export interface WholeJob extends Pick<WriteJob, 'tensors' | 'rects'> {
  modules: readonly PlannedModule[]
  /** Count of the sources of the tensors. */
  sources: number
  /** Sources of the ranks and scales, and their bytes. */
  own: WriteJob['sources']
  ownBytes: number
}

/** Layouts kept for one list of modules: a trainer's adapter comes into a few slots by turns. */
const MOST_SLOTS = 4
/** Digits of a checksum in a digest. */
const SUM_DIGITS = 16

/**
 * Layouts of adapters in slots. A trainer sends the same adapter at every step, so its layouts are computed once for
 * each slot.
 */
export class SlotLayouts {
  readonly #known = new WeakMap<readonly Module[], Map<number, SlotLayout>>()

  /** The list is known again by its identity. */
  of (slot: number, modules: readonly Module[]): SlotLayout {
    let slots = this.#known.get(modules)
    if (slots === undefined) this.#known.set(modules, slots = new Map())
    const known = slots.get(slot)
    if (known !== undefined) return known
    const layout = layOutSlot(slot, modules)
    const [oldest] = slots.keys()
    if (slots.size >= MOST_SLOTS) slots.delete(oldest!)
    slots.set(slot, layout)
    return layout
  }
}

function layOutSlot (slot: number, modules: readonly Module[]): SlotLayout {
  const plans = modules.flatMap(({ module, rank }) => [
    {
      name: `${module.name}.lora_A`,
      cols: module.target === 'embed_tokens' ? rank : module.inSize,
      rects: module.a(slot, 0, rank)
    },
    { name: `${module.name}.lora_B`, cols: rank, rects: module.b(slot, 0, rank) }
  ])
  const sums = packSums(plans)
  // A sum's rectangles are those of its tensor, under the same number.
  const lines = modules
    .map(({ module: { name }, rank, scale }, index) => {
      return { head: `${name} ${rank} ${Math.fround(scale)} `, a: 2 * index }
    })
    .sort((one, other) => one.head < other.head ? -1 : 1)
  return { rects: sums.rects, sums, lines }
}

/**
 * Over the checksums, ranks and scales of all modules, whatever their order in the source (docs/adapters.md).
 * `checksums`: of A and B of each module in turn.
 */
export function digestOf ({ lines }: SlotLayout, checksums: BigUint64Array): string {
  // One text of all checksums, because texts of single ones take most of the time of a small adapter's digest.
  const hex = Buffer.from(bytesIn(checksums)).swap64().toString('hex')
  let text = ''
  for (const { head, a } of lines) {
    const at = a * SUM_DIGITS
    text += `${head}${hex.slice(at, at + SUM_DIGITS)} ${hex.slice(at + SUM_DIGITS, at + 2 * SUM_DIGITS)}\n`
  }
  return createHash('sha256').update(text).digest('hex').slice(0, 16)
}

/** Whether every B is zero: a sync that delivers nothing. */
export function isZero (checksums: BigUint64Array): boolean {
  const halves = new Uint32Array(checksums.buffer, checksums.byteOffset, 2 * checksums.length)
  for (let at = 2; at < halves.length; at += 4) if (halves[at] !== 0 || halves[at + 1] !== 0) return false
  return true
}

function bytesIn ({ buffer, byteOffset, byteLength }: BigUint64Array): Uint8Array {
  return new Uint8Array(buffer, byteOffset, byteLength)
}

/** True if each half is one matrix of its source, so that its rectangles are those of `SlotLayout`. */
export function areWhole (modules: readonly PlannedModule[]): boolean {
  return modules.every(({ a, b }) => (a.parts?.length ?? 1) === 1 && (b.parts?.length ?? 1) === 1)
}

/** The job that copies A and B of each module into the rectangles of a layout. All halves are whole. */
export function slotJob ({ sources }: StoredSource, modules: readonly PlannedModule[], layout: SlotLayout): WriteJob {
  const tensors = new Float64Array(modules.length * 2 * TENSOR_FIELDS)
  let at = 0
  for (const { a, b } of modules) {
    for (const { source, offset, dtype, shape, parts } of [a, b]) {
      const part = parts?.[0]
      const size = bytesOf(dtype)
      const cols = part?.cols ?? shape[1]!
      tensors[at + TENSOR.source] = source
      tensors[at + TENSOR.offset] = part?.offset ?? offset
      tensors[at + TENSOR.dtype] = DTYPES[dtype]
      tensors[at + TENSOR.rows] = part?.rows ?? shape[0]!
      tensors[at + TENSOR.cols] = cols
      tensors[at + TENSOR.rowBytes] = part?.rowBytes ?? cols * size
      tensors[at + TENSOR.colBytes] = part?.colBytes ?? size
      at += TENSOR_FIELDS
    }
  }
  return { sources: [...sources], tensors, rects: layout.rects }
}

/** One job that does both. Tensors of the second come after those of the first. */
export function joinJobs (first: WriteJob, second: WriteJob): WriteJob {
  const tensors = new Float64Array(first.tensors.length + second.tensors.length)
  tensors.set(first.tensors)
  tensors.set(second.tensors, first.tensors.length)
  for (let at = first.tensors.length; at < tensors.length; at += TENSOR_FIELDS) {
    tensors[at + TENSOR.source]! += first.sources.length
  }
  const rects = new Float64Array(first.rects.length + second.rects.length)
  rects.set(first.rects)
  rects.set(second.rects, first.rects.length)
  for (let at = first.rects.length; at < rects.length; at += RECT_FIELDS) {
    rects[at + RECT.tensor]! += first.tensors.length / TENSOR_FIELDS
  }
  return { sources: [...first.sources, ...second.sources], tensors, rects }
}
