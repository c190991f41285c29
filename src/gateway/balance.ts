import { createHash } from 'node:crypto'
import type { IncomingHttpHeaders } from 'node:http'

/** The key that chooses a request's engine. `sticky` keys stay on their engine however busy it is. */
export interface RoutingKey {
  hash: number
  sticky: boolean
}

interface Choice {
  seed: number
  load: number
}

/**
 * Bytes at the beginning of a prompt that are hashed. The samples of a prompt and the turns of a chat have them in
 * common; a prefix that many prompts share is usually shorter.
 */
const PREFIX_BYTES = 1024
/** Prefixes give an engine at most this many times the mean load. */
const SPREAD = 1.25
const PROMPT_FIELDS = ['"input_ids"', '"token_ids"', '"text"', '"prompt"', '"messages"']

/** The session if a header names one, else the beginning of the prompt; null if there is none. */
export function routingKey (headers: IncomingHttpHeaders, body: Buffer): RoutingKey | null {
  const session = headers['x-smg-routing-key'] ?? headers['x-session-id']
  if (typeof session === 'string' && session !== '') return { hash: hash32(Buffer.from(session)), sticky: true }
  const begin = promptBegin(body)
  return begin < 0 ? null : { hash: hash32(body.subarray(begin, begin + PREFIX_BYTES)), sticky: false }
}

/**
 * Rendezvous hashing (Thaler and Ravishankar 1998): chooses the engine with the highest score for the key. When an
 * engine comes or goes, keys of the others stay where they are. Loads are bounded (Mirrokni, Thorup and Zadimoghaddam
 * 2018): a full engine is skipped. Without a key it chooses the least busy engine.
 */
export function choose<T extends Choice> (among: readonly T[], key: RoutingKey | null): T | undefined {
  if (key === null) return leastBusy(among)
  const total = among.reduce((sum, { load }) => sum + load, 0)
  const limit = key.sticky ? Infinity : Math.ceil(SPREAD * (total + 1) / among.length)
  let best: T | undefined
  let bestScore = -1
  for (const one of among) {
    const score = mix(key.hash ^ one.seed)
    if (score > bestScore && one.load < limit) {
      best = one
      bestScore = score
    }
  }
  return best
}

let turn = 0

function leastBusy<T extends Choice> (among: readonly T[]): T | undefined {
  let best: T | undefined
  turn++
  for (let i = 0; i < among.length; i++) {
    const one = among[(i + turn) % among.length]!
    if (best === undefined || one.load < best.load) best = one
  }
  return best
}

/**
 * The offset of the prompt in a JSON body, -1 if none is found. It searches and does not parse: the body is passed on
 * unchanged, and a wrong guess costs at most a prefix hit.
 */
function promptBegin (body: Buffer): number {
  let first = -1
  for (const field of PROMPT_FIELDS) {
    const at = body.indexOf(field)
    if (at < 0 || (first >= 0 && at > first)) continue
    const colon = at + field.length
    if (/^\s*:/.test(body.toString('latin1', colon, colon + 8))) first = at
  }
  return first
}

function hash32 (bytes: Uint8Array): number {
  return createHash('sha1').update(bytes).digest().readUInt32LE()
}

/** Finalizer of MurmurHash3 (Austin Appleby, public domain), as an unsigned number. */
function mix (value: number): number {
  let h = value
  h = Math.imul(h ^ (h >>> 16), 0x85EBCA6B)
  h = Math.imul(h ^ (h >>> 13), 0xC2B2AE35)
  return (h ^ (h >>> 16)) >>> 0
}
