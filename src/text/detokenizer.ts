import { isUtf8 } from 'node:buffer'
import type { ByteForm } from './byte-form.ts'
import type { Detokenizer } from './tokenizer.ts'
import { completeLength } from './utf8.ts'

interface Piece {
  bytes: Buffer
  /** The bytes as text if they are whole characters, else null. */
  text: string | null
}

/** The bytes of every id, computed at first use and kept. */
export class PieceTable {
  readonly strip: ByteForm['strip']
  readonly #pieces: (Piece | null | undefined)[] = []
  readonly #make: (id: number) => Buffer | null

  /** `tokenOf` returns the token of an id, undefined for an unknown id. */
  constructor (form: ByteForm, tokenOf: (id: number) => string | undefined, isAdded: (id: number) => boolean) {
    this.strip = form.strip
    this.#make = id => {
      const token = tokenOf(id)
      return token === undefined ? null : form.bytesOf(token, isAdded(id))
    }
  }

  piece (id: number): Piece | null {
    const known = this.#pieces[id]
    if (known !== undefined) return known
    const bytes = this.#make(id)
    // Unknown ids are not kept, because there is no limit to them.
    if (bytes === null) return null
    const piece = { bytes, text: isUtf8(bytes) ? bytes.toString('utf8') : null }
    this.#pieces[id] = piece
    return piece
  }
}

/** Joins the bytes of tokens and returns whole characters; at most three bytes wait. */
export class ByteDetokenizer implements Detokenizer {
  readonly #table: PieceTable
  readonly #skipped: ReadonlySet<number>
  #stripsLeft: number
  #waiting: Buffer = Buffer.alloc(0)

  constructor (table: PieceTable, skipped: ReadonlySet<number>, continues: boolean) {
    this.#table = table
    this.#skipped = skipped
    this.#stripsLeft = continues ? 0 : table.strip?.count ?? 0
  }

  push (ids: ArrayLike<number>): string {
    let text = ''
    for (let i = 0; i < ids.length; i++) {
      const id = ids[i]!
      if (this.#skipped.has(id)) continue
      const piece = this.#table.piece(id)
      if (piece === null) continue
      if (piece.text !== null) {
        text += this.#drain() + piece.text
      } else {
        const bytes = Buffer.concat([this.#waiting, piece.bytes])
        const complete = completeLength(bytes)
        text += bytes.toString('utf8', 0, complete)
        this.#waiting = bytes.subarray(complete)
      }
    }
    return this.#strip(text)
  }

  flush (): string {
    return this.#strip(this.#drain())
  }

  #drain (): string {
    if (this.#waiting.length === 0) return ''
    const text = this.#waiting.toString('utf8')
    this.#waiting = this.#waiting.subarray(0, 0)
    return text
  }

  #strip (text: string): string {
    while (this.#stripsLeft > 0 && text !== '') {
      const { content } = this.#table.strip!
      if (text.startsWith(content)) {
        text = text.slice(content.length)
        this.#stripsLeft--
      } else {
        this.#stripsLeft = 0
      }
    }
    return text
  }
}
