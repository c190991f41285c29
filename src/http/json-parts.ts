import { Readable } from 'node:stream'
import type { FastifyReply } from 'fastify'
import type { Static, TSchema } from 'typebox'
import { OrderedObject, stringify } from './ordered-json.ts'
import { hasTime, nextTurn } from './turns.ts'

/** Characters that are joined before they are sent. */
const PART = 16 * 1024
/** Texts up to this length are sent whole, with their length in the headers. */
const WHOLE = 256 * 1024
/** Numbers and short rows that JSON.stringify writes at once. */
const AT_ONCE = 512

/** A list whose elements are made when they are written. Its JSON is that of the list. */
export class LazyList {
  readonly length: number
  readonly at: (index: number) => unknown

  constructor (length: number, at: (index: number) => unknown) {
    this.length = length
    this.at = at
  }

  toJSON (): unknown[] {
    return Array.from({ length: this.length }, (_, i) => this.at(i))
  }
}

/** A value whose JSON text has the schema, although its lists may be lazy. */
export type Written<T extends TSchema> = Static<T>

export function written<T> (value: unknown): T {
  return value as T
}

/** The JSON text of a value in parts, each of which takes little time. Joined, they are what `stringify` returns. */
export function* jsonParts (value: unknown): Generator<string, void, undefined> {
  let text = ''
  for (const piece of pieces(value)) {
    text += piece
    if (text.length < PART) continue
    yield text
    text = ''
  }
  if (text !== '') yield text
}

function* pieces (value: unknown): Generator<string, void, undefined> {
  if (value instanceof LazyList) yield* list(value.length, value.at)
  else if (Array.isArray(value)) {
    if (value.every(item => typeof item !== 'object' || item === null)) yield* plain(value)
    else yield* list(value.length, i => value[i])
  } else if (typeof value !== 'object' || value === null || value instanceof OrderedObject || 'toJSON' in value) {
    yield stringify(value)
  } else yield* members(value)
}

function* list (length: number, at: (index: number) => unknown): Generator<string, void, undefined> {
  yield '['
  for (let i = 0; i < length; i++) {
    if (i > 0) yield ','
    const item = at(i)
    if (item === undefined) yield 'null'
    // Rows of scores are many, and JSON.stringify writes them faster than this generator.
    else if (Array.isArray(item) && item.length <= AT_ONCE) yield stringify(item)
    else yield* pieces(item)
  }
  yield ']'
}

function* plain (values: unknown[]): Generator<string, void, undefined> {
  if (values.length <= AT_ONCE) {
    yield stringify(values)
    return
  }
  for (let i = 0; i < values.length; i += AT_ONCE) {
    yield (i === 0 ? '[' : ',') + stringify(values.slice(i, i + AT_ONCE)).slice(1, -1)
  }
  yield ']'
}

function* members (value: object): Generator<string, void, undefined> {
  let before = '{'
  for (const [name, inner] of Object.entries(value)) {
    if (inner === undefined || typeof inner === 'function') continue
    yield `${before}${JSON.stringify(name)}:`
    yield* pieces(inner)
    before = ','
  }
  yield before === '{' ? '{}' : '}'
}

/** The number of values in a value, itself included. Counts no further than just above `most`. */
function partsOf (value: unknown, most: number): number {
  if (typeof value !== 'object' || value === null) return 1
  if (value instanceof LazyList) return most + 1
  let count = 1
  for (const inner of Array.isArray(value) ? value : Object.values(value)) {
    count += typeof inner !== 'object' || inner === null ? 1 : partsOf(inner, most - count)
    if (count > most) break
  }
  return count
}

/** Replies with JSON. A long text is made in slices while it is sent, no faster than the client reads it. */
export async function sendJson (reply: FastifyReply, value: unknown): Promise<FastifyReply> {
  if (partsOf(value, AT_ONCE) <= AT_ONCE) {
    return await reply.header('content-type', 'application/json').send(stringify(value))
  }
  const parts = jsonParts(value)
  let begun = ''
  while (begun.length <= WHOLE) {
    if (!hasTime()) await nextTurn()
    const { done, value: part } = parts.next()
    if (done === true) return await reply.header('content-type', 'application/json').send(begun)
    begun += part
  }
  reply.header('content-type', 'application/json')
  return await reply.send(Readable.from(inTurns(begun, parts), { objectMode: false, highWaterMark: WHOLE }))
}

async function* inTurns (begun: string, parts: Generator<string>): AsyncGenerator<Buffer, void, undefined> {
  yield Buffer.from(begun)
  for (;;) {
    if (!hasTime()) await nextTurn()
    const { done, value } = parts.next()
    if (done === true) return
    yield Buffer.from(value)
  }
}
