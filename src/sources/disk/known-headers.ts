import type { AnnouncedTensor } from '../../contract/weight-source.ts'

/** One file's header, and the size of the file that it was checked against. */
export interface Header {
  json: Buffer
  fileBytes: number
}

/** The tensors of a checkpoint by file and offset, and the index of the file of each name. */
export interface HeaderTensors {
  tensors: readonly AnnouncedTensor[]
  owners: ReadonlyMap<string, number>
}

interface Known {
  headers: readonly Header[]
  found: HeaderTensors
}

/** Checkpoints whose headers are kept. */
const MAX_KNOWN = 32
/** Bytes of all kept headers together. Their tensors take some three times as much. */
const MAX_BYTES = 8 << 20

/**
 * Headers of checkpoints that were read lately, with their tensors. A trainer saves the same tensors at every step, so
 * the headers are equal byte by byte and need no parsing; and the list of tensors is the same one, so plans that were
 * made for it hold without a comparison.
 */
export class KnownHeaders {
  /** The one that was used last comes last. */
  readonly #known: Known[] = []
  #bytes = 0

  /** The tensors of the same headers, if they are known. */
  find (headers: readonly Header[]): HeaderTensors | undefined {
    const at = this.#known.findIndex(known => areEqual(known.headers, headers))
    if (at < 0) return undefined
    const [known] = this.#known.splice(at, 1)
    this.#known.push(known!)
    return known!.found
  }

  keep (headers: readonly Header[], found: HeaderTensors): void {
    const bytes = bytesOf(headers)
    if (bytes > MAX_BYTES) return
    this.#known.push({ headers, found })
    this.#bytes += bytes
    while (this.#bytes > MAX_BYTES || this.#known.length > MAX_KNOWN) {
      this.#bytes -= bytesOf(this.#known.shift()!.headers)
    }
  }
}

function areEqual (a: readonly Header[], b: readonly Header[]): boolean {
  return a.length === b.length &&
    a.every(({ json, fileBytes }, i) => fileBytes === b[i]!.fileBytes && json.equals(b[i]!.json))
}

function bytesOf (headers: readonly Header[]): number {
  return headers.reduce((sum, { json }) => sum + json.length, 0)
}
