import { heldLength } from '../held-text.ts'
import type { Piece, ToolFormat, ToolFunction } from './tool-format.ts'

/** The rest of the reply is searched once for each of them. */
const MOST_FAILED = 64

/**
 * Finds the calls in a reply that arrives in pieces. What it returns, joined, does not depend on where the reply was
 * cut. A call is returned when its block has ended. No text is lost: a malformed block is text, and only white space
 * before a call, or at the end after one, is left out. After MOST_FAILED malformed blocks the rest of the reply is
 * text.
 */
export class ToolParser {
  readonly #format: ToolFormat
  readonly #tools: readonly ToolFunction[]
  #buffer = ''
  /** White space that belongs to the text unless a call follows. */
  #space = ''
  /** Finds the end of the block that the buffer starts with; null between blocks. */
  #ending: ((text: string) => number) | null = null
  #opening = ''
  #last: 'nothing' | 'text' | 'call' = 'nothing'
  /** Openings that began no call. */
  #failed = 0

  constructor (format: ToolFormat, tools: readonly ToolFunction[]) {
    this.#format = format
    this.#tools = tools
  }

  push (text: string): Piece[] {
    this.#buffer += text
    return this.#take(false)
  }

  /** The reply has ended. */
  finish (): Piece[] {
    const pieces = this.#take(true)
    if (this.#last !== 'call' && this.#space !== '') pieces.push(this.#space)
    return pieces
  }

  #take (ended: boolean): Piece[] {
    const pieces: Piece[] = []
    for (;;) {
      if (this.#ending === null) {
        const at = this.#find(ended)
        this.#text(this.#buffer.slice(0, at), pieces)
        this.#buffer = this.#buffer.slice(at)
        this.#opening = this.#openingAt(0)
        if (this.#opening === '') return pieces
        this.#ending = this.#format.ending(this.#opening)
      }
      let length = this.#ending(this.#buffer)
      if (length < 0) {
        if (!ended) return pieces
        length = this.#buffer.length
      }
      this.#ending = null
      this.#block(length, pieces)
    }
  }

  /** Up to where the buffer is text. */
  #find (ended: boolean): number {
    if (this.#failed >= MOST_FAILED) return this.#buffer.length
    const { openings } = this.#format
    const found = openings.map(opening => this.#buffer.indexOf(opening)).filter(at => at >= 0)
    const blank = this.#buffer.length - this.#buffer.trimStart().length
    if (this.#last === 'nothing' && this.#openingAt(blank) !== '') found.push(blank)
    const held = ended ? 0 : heldLength(this.#buffer, openings)
    return Math.min(...found, this.#buffer.length - held)
  }

  #openingAt (at: number): string {
    if (this.#failed >= MOST_FAILED) return ''
    const { openings, openingsAtStart = [] } = this.#format
    const known = this.#last === 'nothing' ? [...openings, ...openingsAtStart] : openings
    return known.find(opening => this.#buffer.startsWith(opening, at)) ?? ''
  }

  #block (length: number, pieces: Piece[]): void {
    const read = this.#format.read(this.#buffer.slice(0, length), this.#tools)
    if (read === null) {
      this.#failed++
      // Only the opening is text for sure: a block may begin in the rest.
      length = this.#opening.length
      this.#text(this.#opening, pieces)
    }
    this.#buffer = this.#buffer.slice(length)
    for (const piece of read ?? []) {
      if (typeof piece === 'string') {
        if (piece.trim() !== '') this.#text(piece, pieces)
      } else {
        this.#space = ''
        this.#last = 'call'
        pieces.push(piece)
      }
    }
  }

  #text (text: string, pieces: Piece[]): void {
    const all = this.#space + text
    const kept = all.trimEnd()
    this.#space = all.slice(kept.length)
    if (kept === '') return
    this.#last = 'text'
    pieces.push(kept)
  }
}
