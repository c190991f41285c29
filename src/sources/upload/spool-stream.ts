import type { StreamPiece, WeightStream } from '../../contract/weight-stream.ts'
import { PAGE_BYTES } from '../../native/host-memory.ts'
import type { SpoolFile, Way } from './spool-file.ts'
import type { SpooledPart } from './spool-sink.ts'
import type { SpoolSlots } from './spool-slots.ts'

/**
 * Bytes of the piece before that begin each piece from the disk: an element of 4 bytes may have left at most 3 there.
 */
const OVERLAP = 4

/** A stretch of an upload: in memory, or in the spooled file. */
export type UploadPart = { buffer: Uint8Array } | SpooledPart

interface Unit {
  begin: number
  bytes: number
  buffer: Uint8Array | undefined
  position: number
  way: Way
}
interface Coming {
  unit: Unit
  slot: Buffer | undefined
  read: Promise<void>
}

/**
 * The parts of an upload one after another, as pieces. The next pieces are read while one is written. Use it only when
 * the whole upload has come.
 */
export class SpoolStream implements WeightStream {
  readonly #file: SpoolFile
  readonly #slots: SpoolSlots
  readonly #units: Iterator<Unit, undefined>
  readonly #coming: Coming[] = []
  #next: Unit | undefined
  /** The slot of the last piece. */
  #out: Buffer | undefined
  /** The last bytes of the last piece. */
  readonly #tail = Buffer.alloc(OVERLAP)

  constructor (file: SpoolFile, slots: SpoolSlots, parts: readonly UploadPart[]) {
    this.#file = file
    this.#slots = slots
    this.#units = units(parts, slots.bytes)
    this.#next = this.#units.next().value
  }

  async ready (): Promise<void> {
    this.#readAhead()
    await this.#coming[0]?.read
  }

  async next (): Promise<StreamPiece | undefined> {
    if (this.#out !== undefined) this.#slots.give(this.#out)
    this.#out = undefined
    this.#readAhead()
    const coming = this.#coming.shift()
    if (coming === undefined) return undefined
    const { unit, slot } = coming
    this.#out = slot
    await coming.read
    const overlap = slot === undefined ? 0 : Math.min(OVERLAP, unit.begin)
    if (slot !== undefined) this.#tail.copy(slot, PAGE_BYTES - OVERLAP)
    const bytes = unit.buffer ?? slot!.subarray(PAGE_BYTES - overlap, PAGE_BYTES + unit.bytes)
    this.#remember(bytes)
    return { begin: unit.begin - overlap, length: bytes.length, source: { buffer: bytes } }
  }

  #readAhead (): void {
    while (this.#next !== undefined) {
      const unit = this.#next
      const slot = unit.buffer === undefined ? this.#slots.tryTake() : undefined
      if (unit.buffer === undefined && slot === undefined) return
      const pages = slot?.subarray(PAGE_BYTES, PAGE_BYTES + Math.ceil(unit.bytes / PAGE_BYTES) * PAGE_BYTES)
      const read = pages === undefined ? Promise.resolve() : this.#file.read(pages, unit.position, unit.way)
      // Its error is thrown when this piece is read.
      read.catch(() => {})
      this.#coming.push({ unit, slot, read })
      this.#next = this.#units.next().value
    }
  }

  #remember (bytes: Uint8Array): void {
    const kept = Math.min(OVERLAP, bytes.length)
    this.#tail.copyWithin(0, kept)
    this.#tail.set(bytes.subarray(bytes.length - kept), OVERLAP - kept)
  }
}

function* units (parts: readonly UploadPart[], slotBytes: number): Generator<Unit, undefined> {
  let begin = 0
  for (const part of parts) {
    if ('buffer' in part) {
      const { buffer } = part
      if (buffer.length > 0) yield { begin, bytes: buffer.length, buffer, position: 0, way: 'cached' }
      begin += buffer.length
      continue
    }
    for (const [index, way] of part.ways.entries()) {
      const at = index * slotBytes
      const bytes = Math.min(slotBytes, part.bytes - at)
      yield { begin, bytes, buffer: undefined, position: part.position + at, way }
      begin += bytes
    }
  }
  return undefined
}
