import { randomInt } from 'node:crypto'
import { RefitError } from '../errors.ts'
import type { ListSpan } from './cut-lists.ts'
import { MAX_BODY_BYTES } from './limits.ts'
import { LONG } from './parse-json.ts'
import { hasTime, nextTurn } from './turns.ts'

// JSON.parse and the validation block the event loop, and what they take depends on the number of values, not on the
// bytes. A point is about 0.1 us, the time of a number. Long lists of numbers are parsed in slices (cut-lists.ts). All
// other values are parsed at once: just below the limit of routes without an admin key, in 110 to 160 ms.

const POINTS = {
  /** One value more. */
  comma: 1,
  string: 8,
  /** An object or a list. */
  container: 6,
  /** A name of a field that no object had after the same names before it: V8 makes a hidden class, which takes 2 us. */
  newName: 30,
  /** Any other name. */
  name: 1,
  /** A name in an object that became a hash table. */
  wideName: 12,
  /** A name that is an array index, such as a token id in `logit_bias`. */
  index: 6
} as const
const INDEX_DIGITS = 9
/** Names after which an object is a hash table. */
const WIDE = 1024
/** Longer names are not compared. */
const LONGEST_NAME = 4096
/** Characters that cost a point: of a string that has to be unescaped, and of all other text that is parsed. */
const [ESCAPED, PLAIN] = [16, 64]
/** Bytes of memory that a point stands for. */
const POINT_BYTES = 12

/** Bytes that are searched one by one, before a native search is faster. */
const NEAR = 48
const STEP = 1 << 18
/** Random, so that no client knows names of equal hashes. */
const SEED = randomInt(2 ** 32)

const [QUOTE, BACKSLASH, OPEN_BRACE, OPEN_BRACKET, CLOSE_BRACE, CLOSE_BRACKET, COMMA, COLON] = Buffer.from(
  '"\\{[}],:'
) as unknown as [
  number,
  number,
  number,
  number,
  number,
  number,
  number,
  number
]

/**
 * Most points of a body of a route that needs no admin key, or of one that does. An owner who raises the limit of
 * bytes wants larger batches, so this one follows it. Trainers announce a hundred thousand tensors, each an object with
 * four fields.
 */
export function mostPoints (auth: string | undefined, maxBodyBytes = MAX_BODY_BYTES): number {
  return Math.floor(Math.max(MAX_BODY_BYTES, maxBodyBytes) / (auth === 'normal' ? 5 : 2))
}

/**
 * Checks before a body is parsed that this takes no long time. Returns the bytes of memory that its values will take,
 * and its long lists of numbers. Throws BODY_TOO_LARGE. Takes time linear in the body, in slices. A body that is not
 * JSON is checked, too.
 */
export async function checkJsonCost (bytes: Buffer, most: number): Promise<{ memory: number, lists: ListSpan[] }> {
  const cost = new JsonCost(bytes)
  while (cost.step()) {
    if (cost.points > most) throw tooMany(cost, most)
    if (!hasTime()) await nextTurn()
  }
  if (cost.points > most) throw tooMany(cost, most)
  return { memory: Math.ceil(cost.points * POINT_BYTES), lists: cost.lists }
}

class JsonCost {
  strings = 0
  containers = 0
  newNames = 0
  names = 0
  wideNames = 0
  indices = 0
  commas = 0
  /** Long lists without strings, lists and objects in them; see cut-lists.ts. */
  readonly lists: ListSpan[] = []
  /** The next step begins here. */
  at = 0
  readonly #bytes: Buffer
  /** Bytes in long strings, which are not parsed, and in strings that have to be unescaped. */
  #long = 0
  #escaped = 0
  /** A hash of the names so far, and their number, of each object and list that is open. */
  readonly #open: { hash: number, names: number }[] = []
  /** Hashes of the names of all objects, which stand for V8's hidden classes. */
  readonly #classes = new Set<number>()
  /** The last string, without its quotes. */
  #begin = 0
  #end = 0
  /** The bracket of the list in which only numbers have come so far; -1 if there is none. */
  #flat = -1

  constructor (bytes: Buffer) {
    this.#bytes = bytes
  }

  get points (): number {
    return this.commas * POINTS.comma + this.strings * POINTS.string + this.containers * POINTS.container +
      this.newNames * POINTS.newName + this.names * POINTS.name + this.wideNames * POINTS.wideName +
      this.indices * POINTS.index +
      this.#escaped / ESCAPED + (this.at - this.#long) / PLAIN
  }

  /** False at the end. */
  step (): boolean {
    const bytes = this.#bytes
    const end = Math.min(bytes.length, this.at + STEP)
    let at = this.at
    while (at < end) {
      switch (bytes[at]) {
        case COMMA:
          this.commas++
          break
        case QUOTE:
          at = this.#skipString(at)
          this.#flat = -1
          break
        case OPEN_BRACE:
        case OPEN_BRACKET:
          this.#flat = bytes[at] === OPEN_BRACKET ? at : -1
          this.containers++
          this.#open.push({ hash: SEED, names: 0 })
          break
        case CLOSE_BRACE:
        case CLOSE_BRACKET:
          if (this.#flat !== -1 && bytes[at] === CLOSE_BRACKET && at - this.#flat > LONG) {
            this.lists.push({ begin: this.#flat, end: at + 1 })
          }
          this.#flat = -1
          this.#open.pop()
          break
        case COLON:
          this.#takeName()
      }
      at++
    }
    this.at = at
    return at < bytes.length
  }

  /** Returns the place of the closing quote. */
  #skipString (open: number): number {
    const bytes = this.#bytes
    let near = open + NEAR
    let isEscaped = false
    let at = open + 1
    while (at < bytes.length && bytes[at] !== QUOTE) {
      if (bytes[at] === BACKSLASH) {
        isEscaped = true
        at += 2
      } else if (++at >= near) {
        const quote = bytes.indexOf(QUOTE, at)
        const end = quote === -1 ? bytes.length : quote
        let slashes = 0
        while (bytes[end - 1 - slashes] === BACKSLASH && slashes < end - at) slashes++
        isEscaped ||= slashes > 0 || bytes.subarray(at, end).includes(BACKSLASH)
        at = slashes % 2 === 0 ? end : end + 1
        near = at + NEAR
      }
    }
    this.#begin = open + 1
    this.#end = at
    this.strings++
    if (isEscaped) this.#escaped += at - open
    else if (at - open > LONG) this.#long += at - open
    return at
  }

  /** The last string was a name. */
  #takeName (): void {
    const object = this.#open.at(-1)
    this.strings--
    if (this.#isIndex()) {
      this.indices++
      return
    }
    if (object === undefined || ++object.names > WIDE) {
      this.wideNames++
      return
    }
    let hash = object.hash
    for (let at = this.#begin; at < Math.min(this.#end, this.#begin + LONGEST_NAME); at++) {
      hash = Math.imul(hash ^ this.#bytes[at]!, 0x01000193)
    }
    object.hash = hash = Math.imul(hash ^ (hash >>> 15) ^ (this.#end - this.#begin), 0x2c1b3c6d)
    if (this.#end - this.#begin <= LONGEST_NAME && this.#classes.has(hash)) this.names++
    else {
      this.newNames++
      this.#classes.add(hash)
    }
  }

  #isIndex (): boolean {
    if (this.#end === this.#begin || this.#end - this.#begin > INDEX_DIGITS) return false
    for (let at = this.#begin; at < this.#end; at++) {
      if (this.#bytes[at]! < 0x30 || this.#bytes[at]! > 0x39) return false
    }
    return true
  }
}

function tooMany (cost: JsonCost, most: number): RefitError {
  const { newName, name, wideName, index, container, string, comma } = POINTS
  return new RefitError(
    'BODY_TOO_LARGE',
    `the body has more values than can be parsed in a short time: its first ${cost.at} bytes have ` +
      `${cost.newNames + cost.names + cost.wideNames + cost.indices} names of fields (${cost.newNames} of them make ` +
      `an object unlike those before), ${cost.containers} objects and lists, ${cost.strings} strings, ` +
      `${cost.commas} commas. A name counts ${name}, or ${newName} if no object before had it in that place ` +
      `(${index} if it is a number, ${wideName} if it follows ${WIDE} others), an object or list ${container}, ` +
      `a string ${string}, a comma ${comma}; the limit is ${most}, and --max-body-bytes raises it. Send the body in ` +
      'several requests'
  )
}
