import type { Network, State } from './network.ts'

/** Deeper texts, such as JSON in JSON, are not allowed. */
const MAX_DEPTH = 512
/** Threads of one configuration. Only an ambiguous grammar needs many. */
const MAX_THREADS = 4096
/** Configurations that are kept, in units of their threads and edges. */
const MAX_KEPT = 1 << 20

/** A state, and the states behind which the calls that led to it continue. Equal links are one object. */
interface Link {
  id: number
  state: number
  parent: Link | null
  depth: number
}

/** All ways in which the text so far can be read. Equal configurations are one object until the cache is cleared. */
export class Configuration {
  /** Links whose state consumes a byte. */
  readonly links: readonly Link[]
  /** The text so far is whole. */
  readonly canEnd: boolean
  /** Per class of bytes: what follows; null if nothing does, undefined if it was not computed yet. */
  readonly next: (Configuration | null | undefined)[]
  /** The allowed tokens, if they were computed. */
  mask: Uint32Array | undefined

  constructor (links: readonly Link[], canEnd: boolean, classes: number) {
    this.links = links
    this.canEnd = canEnd
    this.next = new Array<Configuration | null | undefined>(classes).fill(undefined)
  }
}

/**
 * A network as an automaton over bytes, made deterministic as far as texts need it. Configurations and their edges are
 * computed at first use and kept, so that the same place in a text costs one look-up.
 */
export class Automaton {
  start: Configuration
  readonly #network: Network
  /** Bytes that no edge tells apart have one class. */
  readonly classOf = new Uint8Array(256)
  readonly #classes: number
  readonly #ends = new Set<number>()
  #links = new Map<string, Link>()
  #configurations = new Map<string, Configuration>()
  #kept = 0

  constructor (network: Network) {
    this.#network = network
    for (const { end } of network.rules) this.#ends.add(end)
    const borders = new Uint8Array(257)
    for (const { bytes } of network.states) {
      for (const { first, last } of bytes) borders[first] = borders[last + 1] = 1
    }
    let current = 0
    for (let byte = 0; byte < 256; byte++) {
      if (byte > 0 && borders[byte] === 1) current++
      this.classOf[byte] = current
    }
    this.#classes = current + 1
    this.start = this.#begin()
  }

  /** The configuration after one more byte; null if no text has it there. */
  next (from: Configuration, byte: number): Configuration | null {
    const known = from.next[this.classOf[byte]!]
    return known === undefined ? this.#step(from, byte) : known
  }

  /** After a text that `next` allows, from the start. */
  read (bytes: Uint8Array, from: Configuration): Configuration | null {
    let at: Configuration | null = from
    for (let i = 0; i < bytes.length && at !== null; i++) at = this.next(at, bytes[i]!)
    return at
  }

  /** Frees configurations that no request holds, once there are many. Called between two walks. */
  trim (): void {
    if (this.#kept < MAX_KEPT) return
    for (const { next } of this.#configurations.values()) next.fill(undefined)
    this.#links = new Map()
    this.#configurations = new Map()
    this.#kept = 0
    this.start = this.#begin()
  }

  #begin (): Configuration {
    return this.#configuration([this.#link(this.#network.rules[0]!.start, null)])!
  }

  #step (from: Configuration, byte: number): Configuration | null {
    const targets: Link[] = []
    for (const { state, parent } of from.links) {
      for (const { first, last, to } of this.#network.states[state]!.bytes) {
        if (byte >= first && byte <= last) targets.push(this.#link(to, parent))
      }
    }
    const found = targets.length === 0 ? null : this.#configuration(targets)
    from.next[this.classOf[byte]!] = found
    return found
  }

  /** All that is reached without a byte. Null for a dead end. */
  #configuration (links: readonly Link[]): Configuration | null {
    const seen = new Set(links)
    const active: Link[] = []
    let canEnd = false
    for (const link of seen) {
      if (seen.size > MAX_THREADS) return null
      const { state, parent } = link
      const { bytes, free, calls } = this.#network.states[state]!
      if (bytes.length > 0) active.push(link)
      for (const to of free) seen.add(this.#link(to, parent))
      for (const { rule, to } of calls) {
        // Nothing follows a call at the end of a rule, so its own caller continues: lists need no stack.
        const caller = this.#ends.has(to) && isLast(this.#network.states[to]!) ? parent : this.#link(to, parent)
        if ((caller?.depth ?? 0) < MAX_DEPTH) seen.add(this.#link(this.#network.rules[rule]!.start, caller))
      }
      if (!this.#ends.has(state)) continue
      if (parent === null) canEnd = true
      else seen.add(parent)
    }
    if (active.length === 0 && !canEnd) return null
    active.sort((a, b) => a.id - b.id)
    const key = `${canEnd}${active.map(({ id }) => id).join()}`
    let found = this.#configurations.get(key)
    if (found === undefined) {
      found = new Configuration(active, canEnd, this.#classes)
      this.#configurations.set(key, found)
      this.#kept += active.length + this.#classes
    }
    return found
  }

  #link (state: number, parent: Link | null): Link {
    const key = `${state}/${parent?.id ?? ''}`
    let link = this.#links.get(key)
    if (link === undefined) {
      link = { id: linkIds++, state, parent, depth: (parent?.depth ?? 0) + 1 }
      this.#links.set(key, link)
      this.#kept++
    }
    return link
  }
}

/** Never used twice, so that links from before a `trim` do not look like later ones. */
let linkIds = 0

function isLast ({ bytes, free, calls }: State): boolean {
  return bytes.length === 0 && free.length === 0 && calls.length === 0
}
