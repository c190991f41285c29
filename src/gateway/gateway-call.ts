import type { AuthLevel } from '../http/auth.ts'
import type { OwnHeader } from '../http/pages.ts'
import type { AdapterCall } from './adapters.ts'
import type { JsonBody, Step } from './json-body.ts'

/** The gateway's handling of one path. Each dialect lists its paths in src/dialects/NAME/. */
export interface GatewayCall {
  /**
   * `one`: the engine that load and prefix choose. `any`: the same choice, because all engines give the same reply.
   * `all`: every engine that is alive. `members`: engines that hold weights or will hold them. `group`: those members
   * that are in the process group.
   */
  to: 'one' | 'any' | 'all' | 'members' | 'group'
  /** Default POST. */
  methods?: readonly string[]
  /** Default admin. */
  auth?: AuthLevel
  /** A header that may hold the key instead of `authorization`. */
  keyHeader?: string
  /** Its GET changes something (src/http/pages.ts). */
  ownHeader?: OwnHeader
  /**
   * `weights`: carries weight bytes. `label`: ends an update or labels it. `begin`: opens an update of many requests.
   * `join`, `leave`: a process group. `pause`, `resume`: generation. `memory`: releases it or takes it back.
   */
  effect?: 'weights' | 'label' | 'begin' | 'join' | 'leave' | 'pause' | 'resume' | 'memory'
  /** Ends an update of many requests: the one with the id in the path, else the trainer's scope. */
  endsTransaction?: boolean
  /** Announces tensors that a later call of the same kind writes. `isFirst`: replaces all announcements before it. */
  announces?: { kind: string, isFirst?: boolean }
  /**
   * Writes tensors that were announced: an engine that missed an announcement would write other tensors than the rest.
   */
  announcedBy?: string
  /** Chooses the call by the body, where the path does not decide. */
  byBody?: (body: JsonBody) => GatewayCall
  /** Name of the process group: a field of the body, or a fixed name. Default: the field `group_name`. */
  group?: { field: string } | { name: string }
  /** The fields of the body with the ranks of a process group; each engine gets its own offset. */
  ranks?: RankFields
  /** A list in the body with one entry for each rank of all engines: each engine gets its own part. */
  perRank?: readonly Step[]
  /** The body is not read here: it is passed to all engines piece by piece. */
  streamsBody?: boolean
  /** All engines get the same `id`, which the gateway makes if the caller sends none. */
  sharesId?: boolean
  /** The field of the body with the path of a checkpoint. */
  checkpoint?: readonly Step[]
  /** It loads or unloads a LoRA adapter. `path`: the path ends with the name; POST loads and DELETE unloads. */
  adapter?: AdapterCall | 'path'
  /** The call works for one engine only; the text is the reason. */
  oneEngineOnly?: string
  merge?: MergeRule
  /** The reply of one engine describes the whole fleet after this change. GET only. */
  describe?: (reply: Record<string, unknown>, fleet: FleetSize) => object
}

/** The calls by path; parameters are written as in Fastify's routes. */
export type GatewayCalls = Readonly<Record<string, GatewayCall>>

/** The facts about a dialect that the gateway needs. */
export interface DialectCalls {
  name: string
  /** A path that several dialects serve is listed once: by the dialect whose folder in routes/ holds it. */
  calls: GatewayCalls
  /** Paths that the gateway refuses because they only make sense at one engine, with what to do instead. */
  refusedByGateway?: Readonly<Record<string, string>>
}

export interface RankFields {
  at: readonly Step[]
  offset: string
  world: string
}

/** How the replies of many engines become one reply. `engines` always holds all of them. */
export interface MergeRule {
  /** A field that must be equal in all replies. */
  agree?: string
  /** Lists that are joined. */
  join?: readonly string[]
  /** Numbers that are added up. */
  sum?: readonly string[]
  /** Booleans that are true if they are true in all replies. */
  every?: readonly string[]
}

export interface FleetSize {
  /** Ranks of all engines together. */
  ranks: number
  /** The engines as /workers lists them. */
  engines: readonly object[]
}

/** The group of calls that name none, such as vLLM's transfer engine, which has one group only. */
export const UNNAMED_GROUP = 'weight_update_group'

// The calls that most dialects have.
export const GET = ['GET']
export const BOTH = ['GET', 'POST']
export const one: GatewayCall = { to: 'one', auth: 'normal' }
export const any: GatewayCall = { to: 'any', auth: 'normal', methods: BOTH }
export const state: GatewayCall = { to: 'all', methods: BOTH, ownHeader: true }
export const weights: GatewayCall = { to: 'members', effect: 'weights' }
export const label: GatewayCall = { to: 'members', effect: 'label' }
export const end: GatewayCall = { ...label, endsTransaction: true }
export const begin: GatewayCall = { to: 'members', effect: 'begin' }
export const pause: GatewayCall = { to: 'all', effect: 'pause' }
export const resume: GatewayCall = { to: 'all', effect: 'resume' }
export const memory: GatewayCall = { ...state, effect: 'memory' }
export const broadcast: GatewayCall = { to: 'group', effect: 'weights' }
export const leave: GatewayCall = { to: 'group', effect: 'leave' }

/** SGLang's and vLLM's fields. */
export const loadsAdapter: GatewayCall = {
  to: 'members',
  adapter: { kind: 'load', name: 'lora_name', folder: 'lora_path' }
}
export const unloadsAdapter: GatewayCall = { to: 'members', adapter: { kind: 'unload', name: 'lora_name' } }

/** A GET that reads the same from every engine. */
export function read (merge: MergeRule = {}): GatewayCall {
  return { to: 'all', auth: 'normal', methods: GET, merge }
}

export function join (at: readonly Step[] = [], offset = 'rank_offset', world = 'world_size'): GatewayCall {
  return { to: 'members', effect: 'join', ranks: { at, offset, world } }
}

/** The same call for several paths. */
export function paths (call: GatewayCall, ...names: string[]): Record<string, GatewayCall> {
  return Object.fromEntries(names.map(name => [name, call]))
}

/** A path that no dialect lists goes to all engines; with `weight` or `lora` in it, it counts as a weight update. */
export function unknownCall (path: string, method: string): GatewayCall {
  return method !== 'GET' && /weight|lora/.test(path) ? weights : { to: 'all' }
}
