import { reducePickle } from './call.ts'
import type { TextBudget } from './call.ts'
import { limited, malformed, refused } from './error.ts'
import { MAX_GLOBAL_NAME, MAX_LONG_BYTES, PICKLE_LIMITS } from './limits.ts'
import type { PickleLimits } from './limits.ts'
import { readLong } from './numbers.ts'
import { describeOpcode } from './opcodes.ts'
import {
  describePickle,
  PickleBytes,
  PickleDict,
  PickleFloat,
  PickleList,
  PickleName,
  PickleObject,
  PickleSet
} from './values.ts'
import type { PickleTuple, PickleValue } from './values.ts'
import { clip } from '../strict-json.ts'

// A pickle is a program for a stack machine. This one knows the opcodes that put data together (protocols 2 to 5) and no others;
// the opcodes that would import a name look it up in a closed set, and those that would call it write down that they were met.
// Nothing recurses, and each opcode takes time and memory in proportion to its own bytes.

/** The closed set: a name of it, a sentence on why a known name is not in it, or undefined. */
export type PickleNames = (module: string, name: string) => PickleName | string | undefined

const LOWEST_PROTOCOL = 2
const HIGHEST_PROTOCOL = 5
const NO_ARGS: PickleTuple = []
const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true })

/** Reads one pickle, whole. Throws PICKLE_MALFORMED, PICKLE_REFUSED or PICKLE_LIMIT; bytes of the result are views of `bytes`. */
export function readPickle (bytes: Uint8Array, names: PickleNames, limits: PickleLimits = PICKLE_LIMITS): PickleValue {
  return new PickleReader(bytes, names, limits).read()
}

class PickleReader {
  readonly #bytes: Buffer
  readonly #end: number
  readonly #names: PickleNames
  readonly #limits: PickleLimits
  /** Of a height of its own: what lies above it is left there, for setting an array's length is slow. */
  readonly #stack: PickleValue[] = []
  #height = 0
  /** Stack heights at the open MARKs, innermost last; values below the innermost cannot be reached. */
  readonly #marks: number[] = []
  #floor = 0
  readonly #memo: PickleValue[]
  #memoized = 0
  #objects = 0
  #items = 0
  #frameEnd = 0
  readonly #budget: TextBudget
  /** Of the opcode under way. */
  #op = 0
  #at = 0

  constructor (bytes: Uint8Array, names: PickleNames, limits: PickleLimits) {
    this.#bytes = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength)
    this.#end = bytes.byteLength
    this.#names = names
    this.#limits = limits
    this.#budget = { left: this.#end }
    // Room for what handles need, which spares most copying as it grows.
    this.#memo = new Array<PickleValue>(Math.min(this.#end >>> 4, limits.memo))
  }

  read (): PickleValue {
    const bytes = this.#bytes
    this.#start()
    for (;;) {
      const op = this.#op = this.#at
      if (op >= this.#end) throw this.#cutOff()
      this.#at++
      // Numbers, not names, so that this is compiled to a jump table.
      switch (bytes[op]) {
        case 0x94:
          this.#memoize(this.#memoized)
          break // MEMOIZE
        case 0x4b:
          this.#push(bytes[this.#take(1)]!)
          break // BININT1
        case 0x68:
          this.#get(bytes[this.#take(1)]!)
          break // BINGET
        case 0x6a:
          this.#get(this.#u32())
          break // LONG_BINGET
        case 0x85:
          this.#tuple(this.#height - 1)
          break // TUPLE1
        case 0x86:
          this.#tuple(this.#height - 2)
          break // TUPLE2
        case 0x87:
          this.#tuple(this.#height - 3)
          break // TUPLE3
        case 0x52:
          this.#reduce()
          break // REDUCE
        case 0x28:
          this.#mark()
          break // MARK
        case 0x74:
          this.#tuple(this.#unmark())
          break // TUPLE
        case 0x4d:
          this.#push(bytes.readUInt16LE(this.#take(2)))
          break // BININT2
        case 0x4a:
          this.#push(bytes.readInt32LE(this.#take(4)))
          break // BININT
        case 0x43:
          this.#binary(bytes[this.#take(1)]!)
          break // SHORT_BINBYTES
        case 0x8c:
          this.#text(bytes[this.#take(1)]!)
          break // SHORT_BINUNICODE
        case 0x88:
          this.#push(true)
          break // NEWTRUE
        case 0x89:
          this.#push(false)
          break // NEWFALSE
        case 0x4e:
          this.#push(null)
          break // NONE
        case 0x8a:
          this.#long(bytes[this.#take(1)]!)
          break // LONG1
        case 0x61:
          this.#append(this.#height - 1)
          break // APPEND
        case 0x65:
          this.#append(this.#unmark())
          break // APPENDS
        case 0x73:
          this.#setItems(this.#height - 2)
          break // SETITEM
        case 0x75:
          this.#setItems(this.#unmark())
          break // SETITEMS
        case 0x29:
          this.#push(NO_ARGS)
          break // EMPTY_TUPLE
        case 0x5d:
          this.#make(new PickleList())
          break // EMPTY_LIST
        case 0x7d:
          this.#make(new PickleDict())
          break // EMPTY_DICT
        case 0x8f:
          this.#make(new PickleSet([]))
          break // EMPTY_SET
        case 0x90:
          this.#addItems()
          break // ADDITEMS
        case 0x91:
          this.#make(new PickleSet(this.#cut(this.#unmark())))
          break // FROZENSET
        case 0x93:
          this.#stackGlobal()
          break // STACK_GLOBAL
        case 0x63:
          this.#global(this.#line(), this.#line())
          break // GLOBAL
        case 0x81:
          this.#newObject()
          break // NEWOBJ
        case 0x62:
          this.#build()
          break // BUILD
        case 0x51:
          this.#persistent()
          break // BINPERSID
        case 0x71:
          this.#memoize(bytes[this.#take(1)]!)
          break // BINPUT
        case 0x72:
          this.#memoize(this.#u32())
          break // LONG_BINPUT
        case 0x58:
          this.#text(this.#u32())
          break // BINUNICODE
        case 0x8d:
          this.#text(this.#u64())
          break // BINUNICODE8
        case 0x42:
          this.#binary(this.#u32())
          break // BINBYTES
        case 0x8e:
          this.#binary(this.#u64())
          break // BINBYTES8
        case 0x96:
          this.#binary(this.#u64())
          break // BYTEARRAY8
        case 0x8b:
          this.#long(this.#u32())
          break // LONG4
        case 0x47:
          this.#make(new PickleFloat(bytes.readDoubleBE(this.#take(8))))
          break // BINFLOAT
        case 0x95:
          this.#frame()
          break // FRAME
        case 0x30:
          this.#drop()
          break // POP
        case 0x31:
          this.#height = this.#unmark()
          break // POP_MARK
        case 0x2e:
          return this.#stop() // STOP
        case 0x80:
          throw malformed('a second PROTO', op)
        default:
          throw refused(describeOpcode(bytes[op]!), op)
      }
    }
  }

  #start (): void {
    if (this.#end > this.#limits.bytes) throw limited(`${this.#end} bytes, at most ${this.#limits.bytes} are read`, 0)
    if (this.#end === 0) throw malformed('it is empty', 0)
    if (this.#bytes[0] !== 0x80) {
      throw malformed(`it does not begin with PROTO (80) but with ${this.#bytes[0]!.toString(16).padStart(2, '0')}`, 0)
    }
    if (this.#end < 2) throw this.#cutOff()
    const protocol = this.#bytes[1]!
    if (protocol < LOWEST_PROTOCOL || protocol > HIGHEST_PROTOCOL) {
      throw malformed(`protocol ${protocol}; ${LOWEST_PROTOCOL} to ${HIGHEST_PROTOCOL} are read`, 0)
    }
    this.#at = 2
  }

  #stop (): PickleValue {
    if (this.#height !== 1 || this.#marks.length > 0) {
      throw malformed(
        `it stops with ${this.#height} values on its stack`,
        this.#op
      )
    }
    if (this.#at !== this.#end) throw malformed(`${this.#end - this.#at} bytes follow its end`, this.#at)
    return this.#stack[0]!
  }

  #cutOff (): Error {
    return malformed(`it is cut off after ${this.#end} bytes`, this.#op)
  }

  /** Moves past `count` bytes and says where they begin. */
  #take (count: number): number {
    const at = this.#at
    if (count > this.#end - at) throw this.#cutOff()
    this.#at = at + count
    return at
  }

  #u32 (): number {
    return this.#bytes.readUInt32LE(this.#take(4))
  }

  /** Past 2^53 it is rounded, and too much all the same. */
  #u64 (): number {
    const at = this.#take(8)
    return this.#bytes.readUInt32LE(at) + this.#bytes.readUInt32LE(at + 4) * 0x1_0000_0000
  }

  #frame (): void {
    const length = this.#u64()
    if (this.#op < this.#frameEnd) throw malformed('a FRAME inside another', this.#op)
    if (length > this.#end - this.#at) throw this.#cutOff()
    this.#frameEnd = this.#at + length
  }

  #push (value: PickleValue): void {
    if (this.#height >= this.#limits.stack) {
      throw limited(
        `more than ${this.#limits.stack} values on its stack`,
        this.#op
      )
    }
    this.#stack[this.#height++] = value
  }

  /** Pushes what took memory. */
  #make (value: PickleValue): void {
    if (++this.#objects > this.#limits.objects) throw limited(`more than ${this.#limits.objects} objects`, this.#op)
    this.#push(value)
  }

  #pop (): PickleValue {
    if (this.#height <= this.#floor) throw this.#underflow()
    return this.#stack[--this.#height]!
  }

  #underflow (): Error {
    return malformed('an opcode takes more values than there are', this.#op)
  }

  /** The values from `from` on, off the stack. */
  #cut (from: number): PickleTuple {
    if (from < this.#floor) throw this.#underflow()
    const stack = this.#stack
    const count = this.#height - from
    this.#countItems(count)
    const values: PickleTuple = new Array<PickleValue>(count)
    for (let i = 0; i < count; i++) values[i] = stack[from + i]!
    this.#height = from
    return values
  }

  #countItems (count: number): void {
    this.#items += count
    if (this.#items > this.#limits.items) {
      throw limited(
        `more than ${this.#limits.items} values in its tuples, lists and dicts`,
        this.#op
      )
    }
  }

  #tuple (from: number): void {
    this.#make(this.#cut(from))
  }

  #mark (): void {
    if (this.#marks.length >= this.#limits.depth) {
      throw limited(
        `values nest deeper than ${this.#limits.depth}`,
        this.#op
      )
    }
    this.#floor = this.#height
    this.#marks.push(this.#floor)
  }

  /** Closes the innermost MARK and says where its values begin. */
  #unmark (): number {
    const from = this.#marks.pop()
    if (from === undefined) throw malformed('an opcode needs a MARK, and none is open', this.#op)
    this.#floor = this.#marks.length === 0 ? 0 : this.#marks[this.#marks.length - 1]!
    return from
  }

  /** As Python has it, POP takes a MARK off where no value lies above it. */
  #drop (): void {
    if (this.#marks.length > 0 && this.#height === this.#floor) this.#unmark()
    else this.#pop()
  }

  #top (): PickleValue {
    if (this.#height <= this.#floor) throw this.#underflow()
    return this.#stack[this.#height - 1]!
  }

  #memoize (index: number): void {
    // Every pickler numbers its memo from 0 on without holes; an index out of line would only make us allocate.
    if (index > this.#memoized) throw malformed(`memo ${index} is set while ${this.#memoized} are in use`, this.#op)
    if (index >= this.#limits.memo) throw limited(`more than ${this.#limits.memo} values in its memo`, this.#op)
    this.#memo[index] = this.#top()
    if (index === this.#memoized) this.#memoized++
  }

  #get (index: number): void {
    if (index >= this.#memoized) throw malformed(`memo ${index} is used and not set`, this.#op)
    this.#push(this.#memo[index]!)
  }

  #long (length: number): void {
    if (length > MAX_LONG_BYTES) throw limited(`an int of ${length} bytes (at most ${MAX_LONG_BYTES})`, this.#op)
    this.#push(readLong(this.#bytes, this.#take(length), length))
  }

  #binary (length: number): void {
    const start = this.#take(length)
    this.#make(new PickleBytes(this.#bytes, start, start + length))
  }

  #text (length: number): void {
    if (length > this.#limits.text) {
      throw limited(
        `a string of ${length} bytes (at most ${this.#limits.text})`,
        this.#op
      )
    }
    const start = this.#take(length)
    this.#make(this.#string(start, start + length))
  }

  #string (start: number, end: number): string {
    const bytes = this.#bytes
    for (let at = start; at < end; at++) {
      if (bytes[at]! < 0x80) continue
      try {
        return utf8.decode(bytes.subarray(start, end))
      } catch {
        throw malformed('a string is not UTF-8', this.#op)
      }
    }
    return bytes.toString('latin1', start, end)
  }

  #line (): string {
    const start = this.#at
    const end = this.#bytes.indexOf(0x0a, start)
    if (end === -1) throw this.#cutOff()
    if (end - start > MAX_GLOBAL_NAME) {
      throw malformed(
        `a name of ${end - start} bytes (at most ${MAX_GLOBAL_NAME})`,
        this.#op
      )
    }
    this.#at = end + 1
    return this.#string(start, end)
  }

  #stackGlobal (): void {
    const name = this.#pop()
    const module = this.#pop()
    if (typeof name !== 'string' || typeof module !== 'string') {
      throw malformed(
        'STACK_GLOBAL without two strings',
        this.#op
      )
    }
    // Of a text that stands there once, thousands of names may be made.
    const length = Math.max(name.length, module.length)
    if (length > MAX_GLOBAL_NAME) {
      throw malformed(
        `a name of ${length} characters (at most ${MAX_GLOBAL_NAME})`,
        this.#op
      )
    }
    this.#global(module, name)
  }

  #global (module: string, name: string): void {
    const found = this.#names(module, name)
    if (found instanceof PickleName) return this.#push(found)
    const reason = found === undefined ? 'is not a name that refit knows' : `is not taken: ${found}`
    throw refused(
      `${
        JSON.stringify(clip(`${clip(module, MAX_GLOBAL_NAME)}.${clip(name, MAX_GLOBAL_NAME)}`, 2 * MAX_GLOBAL_NAME))
      } ${reason}`,
      this.#op
    )
  }

  #reduce (): void {
    const args = this.#pop()
    const callee = this.#pop()
    if (!(callee instanceof PickleName)) {
      throw refused(
        `REDUCE calls ${describePickle(callee)}, which is not a known function`,
        this.#op
      )
    }
    if (!Array.isArray(args)) throw malformed(`REDUCE with ${describePickle(args)} for a tuple`, this.#op)
    this.#make(
      callee.use === 'any'
        ? new PickleObject(callee, this.#own(args))
        : reducePickle(callee, args, this.#budget, this.#op)
    )
  }

  /** Something beside the pickle; only of those who have a name for it. */
  #persistent (): void {
    const name = this.#names('pickle', 'persistent_load')
    if (!(name instanceof PickleName) || name.use !== 'call') throw refused(describeOpcode(0x51), this.#op)
    this.#make(new PickleObject(name, [this.#pop()]))
  }

  #newObject (): void {
    const args = this.#pop()
    const name = this.#pop()
    const isAny = name instanceof PickleName && name.use === 'any'
    if (!isAny && !(name instanceof PickleName && name.use === 'class')) {
      throw refused(
        `NEWOBJ of ${describePickle(name)}, which is not a known class`,
        this.#op
      )
    }
    if (!Array.isArray(args)) throw malformed(`NEWOBJ with ${describePickle(args)} for a tuple`, this.#op)
    this.#make(new PickleObject(name, isAny ? this.#own(args) : args))
  }

  /** A copy of arguments, for a record that may be given more; thousands of them may be made of one tuple. */
  #own (args: PickleTuple): PickleTuple {
    this.#countItems(args.length)
    return [...args]
  }

  #build (): void {
    const state = this.#pop()
    const object = this.#top()
    if (keeps(object, state)) return
    if (!(object instanceof PickleObject) || object.name.use !== 'class') {
      throw refused(
        `BUILD on ${describePickle(object)}`,
        this.#op
      )
    }
    if (!(state instanceof PickleDict)) throw refused(`BUILD with ${describePickle(state)} for a dict`, this.#op)
    if (object.state !== null) throw refused('BUILD for a second time on one object', this.#op)
    object.state = state
  }

  #append (from: number): void {
    const values = this.#cut(from)
    const list = this.#top()
    if (keeps(list, values)) return
    if (!(list instanceof PickleList)) throw malformed(`APPEND to ${describePickle(list)}`, this.#op)
    for (const value of values) list.items.push(value)
  }

  #setItems (from: number): void {
    const values = this.#cut(from)
    const dict = this.#top()
    if (keeps(dict, values)) return
    if (!(dict instanceof PickleDict)) throw malformed(`SETITEM on ${describePickle(dict)}`, this.#op)
    if (values.length % 2 !== 0) throw malformed('SETITEMS with a key and no value', this.#op)
    for (let i = 0; i < values.length; i += 2) {
      dict.keys.push(values[i]!)
      dict.values.push(values[i + 1]!)
    }
  }

  #addItems (): void {
    const values = this.#cut(this.#unmark())
    const set = this.#top()
    if (keeps(set, values)) return
    if (!(set instanceof PickleSet)) throw malformed(`ADDITEMS to ${describePickle(set)}`, this.#op)
    for (const value of values) set.items.push(value)
  }
}

/** A record of a name that may be anything keeps whatever it is given. */
function keeps (value: PickleValue, given: PickleValue): boolean {
  if (!(value instanceof PickleObject) || value.name.use !== 'any') return false
  value.args.push(given)
  return true
}
