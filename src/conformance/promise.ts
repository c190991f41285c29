import type { Context } from './context.ts'

/** A way in which a promise is tried: a transport, a pause mode, or `once`. */
export interface Way {
  readonly name: string
  /** Why this server cannot be tried in this way; absent if it can. */
  readonly missing?: string | undefined
}

/** One promise of weight sync. */
export interface ConformancePromise {
  readonly group: string
  readonly id: string
  /** One sentence: what is promised. */
  readonly title: string
  /** The ways to try it, each a row of the table. */
  readonly ways: (context: Context) => readonly Way[]
  /**
   * Runs with variant A in place, and may leave any state. Resolves if the promise is kept, with a detail for the
   * table. Throws Broken or NotOffered.
   */
  readonly check: (context: Context, way: Way) => Promise<string | undefined>
}

interface PromiseOptions<W extends Way> {
  title: string
  /** Default: once. */
  ways?: (context: Context) => readonly W[]
  check: (context: Context, way: W) => Promise<string | undefined>
}

const ONCE: readonly Way[] = [{ name: '' }]

export function definePromise<W extends Way> (
  group: string,
  id: string,
  { title, ways = () => ONCE as readonly W[], check }: PromiseOptions<W>
): ConformancePromise {
  return { group, id, title, ways, check: async (context, way) => await check(context, way as W) }
}

/** The promise is broken; the message is what was observed. */
export class Broken extends Error {
  override readonly name = 'Broken'
}

/** The server refused a request with this status. */
export class Refused extends Broken {
  readonly status: number

  constructor (status: number, message: string) {
    super(message)
    this.status = status
  }
}

/** The server lacks what the promise is about; the message says what. */
export class NotOffered extends Error {
  override readonly name = 'NotOffered'
}

/** Throws Broken unless `isTrue`. */
export function expect (isTrue: boolean, observed: string): asserts isTrue {
  if (!isTrue) throw new Broken(observed)
}

export type Verdict = 'kept' | 'broken' | 'not offered' | 'not run'

/** A row of the table. */
export interface Row {
  group: string
  id: string
  way: string
  title: string
  verdict: Verdict
  detail: string
  seconds: number
}
