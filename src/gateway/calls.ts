import type { AuthLevel } from '../http/auth.ts'
import type { JsonBody, Step } from './json-body.ts'
import { NAMELESS, RPC, scopeCall, updateInfoCall } from './calls-by-body.ts'

/**
 * What the gateway does with a path. One table for all dialects: a new route of engines is a line here; what differs by the body is in calls-by-body.ts.
 */
export interface Call {
  /**
   * `one`: to the engine that load and prefix choose. `any`: likewise, as all answer alike. `all`: to all that live. `members`: to those that hold weights or are to
   * hold them. `group`: to those of them that are in the process group.
   */
  to: 'one' | 'any' | 'all' | 'members' | 'group'
  /** Default POST. */
  methods?: readonly string[]
  /** Default admin. */
  auth?: AuthLevel
  /** Where the key may stand besides `authorization`. */
  keyHeader?: string
  /**
   * `weights`: brings bytes. `label`: ends or labels what others brought. `begin`: opens an update of many requests. `join`, `leave`: of a process group. `pause`, `resume`: generation.
   * `memory`: gives it up or takes it back.
   */
  does?: 'weights' | 'label' | 'begin' | 'join' | 'leave' | 'pause' | 'resume' | 'memory'
  /** Tells engines what a later call of this kind needs. `isFirst`: in place of all that was told before. */
  announces?: { kind: string, isFirst?: boolean }
  /** Weights that were announced: an engine that missed an announcement takes another update than the others. */
  announcedBy?: string
  /** The call by its body. */
  by?: (body: JsonBody) => Call
  /** Name of the process group: the field, or a name. Default `group_name`. */
  group?: { field: string } | { name: string }
  /** Where the ranks of a process group stand; each engine gets its own offset. */
  ranks?: Ranks
  /** A list that has an entry for each rank of all engines is cut. */
  cut?: readonly Step[]
  /** Nothing of the body is read: it goes to all piece by piece. */
  stream?: boolean
  /** One id for all engines, where the caller names none. */
  id?: boolean
  /** Where the path of a checkpoint stands. */
  checkpoint?: readonly Step[]
  /** One engine alone can do it: why, in words. */
  alone?: string
  answer?: Answer
}

export interface Ranks {
  at: readonly Step[]
  offset: string
  world: string
}

/** How answers become one, besides `engines`. */
export interface Answer {
  /** It has to be the same everywhere. */
  agree?: string
  /** Lists that are joined. */
  join?: readonly string[]
  /** Numbers that are added up. */
  sum?: readonly string[]
  /** True where it is true everywhere. */
  every?: readonly string[]
}

const GET = ['GET']
const BOTH = ['GET', 'POST']
const one: Call = { to: 'one', auth: 'normal' }
const any: Call = { to: 'any', auth: 'normal', methods: BOTH }
const seen = (answer: Answer = {}): Call => ({ to: 'all', auth: 'normal', methods: GET, answer })
const state: Call = { to: 'all', methods: BOTH }
const weights: Call = { to: 'members', does: 'weights' }
const label: Call = { to: 'members', does: 'label' }
const pause: Call = { to: 'all', does: 'pause' }
const resume: Call = { to: 'all', does: 'resume' }
const memory: Call = { ...state, does: 'memory' }
const broadcast: Call = { to: 'group', does: 'weights' }
const leave: Call = { to: 'group', does: 'leave' }
const join = (at: readonly Step[] = [], offset = 'rank_offset', world = 'world_size'): Call => ({
  to: 'members',
  does: 'join',
  ranks: { at, offset, world }
})
const adapter: Call = { to: 'members', does: 'label' }
const NEMO_KEY = 'x-nemo-rl-refit-key'
const nobody = 'it makes one engine rank 0 of a group that has one engine'

/** By path, with parameters as Fastify writes them. */
export const CALLS: Readonly<Record<string, Call>> = {
  // Generation.
  '/generate': { ...one, methods: ['POST', 'PUT'] },
  ...all(
    one,
    '/v1/completions',
    '/v1/chat/completions',
    '/v1/chat/completions/render',
    '/inference/v1/generate',
    '/skyrl/v1/generate',
    '/generate/',
    '/chat/',
    '/get_sequence_logprobs/'
  ),
  ...all(one, '/tokenize', '/detokenize', '/v1/tokenize', '/v1/detokenize'),

  // What the engines are.
  ...all(any, '/', '/model_info', '/get_model_info', '/version', '/parallelism_config'),
  // Read alone: a proxy before an engine may resolve `..`.
  ...all({ ...any, methods: GET }, '/v1/models', '/v1/models/*'),
  ...all({ ...any, auth: 'public' }, '/health_generate', '/liveness', '/health/'),
  ...all(
    { ...any, auth: 'admin' },
    '/get_weights_by_name',
    '/remote_instance_transfer_engine_info',
    '/get_remote_instance_transfer_engine_info'
  ),
  ...all(seen({ agree: 'weight_version' }), '/weight_version', '/get_weight_version', '/weight_info'),
  ...all(seen({ join: ['loads'] }), '/get_load', '/v1/loads'),
  '/is_paused': seen({ every: ['is_paused'] }),
  '/is_sleeping': seen({ every: ['is_sleeping'] }),

  // Their state.
  ...all(pause, '/pause_generation', '/pause', '/areal_pause_generation', '/engine/pause_generation'),
  ...all(resume, '/continue_generation', '/resume', '/areal_continue_generation', '/engine/resume_generation'),
  ...all(
    state,
    '/flush_cache',
    '/reset_prefix_cache',
    '/reset_prefix_cache/',
    '/reset_mm_cache',
    '/reset_encoder_cache'
  ),
  ...all(memory, '/release_memory_occupation', '/resume_memory_occupation', '/sleep', '/wake_up'),
  ...all(
    state,
    '/abort_request',
    '/finish_session',
    '/post_process_weights',
    '/release_kept_tensors',
    '/start_profile',
    '/stop_profile',
    '/start_draft_weight_update'
  ),
  '/abort_requests': { ...state, answer: { sum: ['aborted'] } },
  '/weights_checker': { ...state, answer: { agree: 'checksums' } },
  '/weight_checker': { ...state, answer: { every: ['match'], join: ['mismatches'] } },

  // Weights: whole checkpoints, and what is in the body or on the host.
  ...all({ ...weights, checkpoint: ['model_path'] }, '/update_weights_from_disk', '/areal_update_weights'),
  '/update_weights_from_tensor': { ...weights, cut: ['serialized_named_tensors'] },
  '/update_weights_from_ipc': weights,
  '/areal_update_weights_tensor': { ...weights, stream: true },
  ...all(
    adapter,
    '/load_lora_adapter',
    '/unload_lora_adapter',
    '/load_lora_adapter_from_tensors',
    '/load_lora_adapter_from_distributed',
    '/v1/load_lora_adapter',
    '/v1/unload_lora_adapter',
    '/skyrl/v1/load_lora_adapter',
    '/areal_update_weights_lora'
  ),
  // They change a host's disk, which is for an engine that is being filled, too.
  '/pull_weights': { to: 'members' },
  '/fetch_weights': { to: 'members', answer: { join: ['result'] } },
  // Changes relative to what all have; the flush writes them.
  '/nemo-rl/refit/prepare': { to: 'members', keyHeader: NEMO_KEY, announces: { kind: 'nemo-rl', isFirst: true } },
  '/nemo-rl/refit/s3-manifest': { to: 'members', keyHeader: NEMO_KEY, announces: { kind: 'nemo-rl' } },
  '/nemo-rl/refit/zmq-flush': { to: 'members', keyHeader: NEMO_KEY },
  '/nemo-rl/refit/flush': { ...weights, keyHeader: NEMO_KEY, announcedBy: 'nemo-rl' },

  // Weights through process groups.
  ...all(join(), '/init_weights_update_group', '/areal_init_weights_update_group', '/init_weight_update_communicator'),
  ...all(
    { ...join(['init_info']), group: { name: NAMELESS } },
    '/init_weight_transfer_engine',
    '/engine/init_weights_update_group'
  ),
  '/init_broadcaster': { ...join([], 'rank_offset', 'inference_world_size'), group: { name: NAMELESS } },
  ...all(broadcast, '/update_weights_from_distributed', '/update_weights_skyrl'),
  // Announced, and brought by the next call.
  '/areal_set_update_weight_meta': { to: 'group', announces: { kind: 'areal', isFirst: true } },
  '/areal_update_weights_xccl': { ...broadcast, announcedBy: 'areal' },
  '/areal_set_update_weight_meta_lora': { to: 'group', announces: { kind: 'areal-lora', isFirst: true } },
  '/areal_update_weights_lora_xccl': { ...broadcast, announcedBy: 'areal-lora' },
  '/destroy_weights_update_group': leave,
  ...all({ to: 'all', alone: nobody }, '/init_communicator', '/init_communicator/'),
  ...all({ to: 'all', does: 'weights' }, '/update_named_param', '/update_named_param/'),
  ...all({ to: 'all' }, '/close_communicator', '/close_communicator/'),
  '/update_weights': { ...weights, by: body => updateInfoCall(body, []) },
  '/engine/update_weights_from_distributed': { ...weights, by: body => scopeCall(body) },
  '/collective_rpc': { to: 'all', by: body => RPC[body.text('method') ?? '']?.(body) ?? { to: 'all' } },

  // Updates of many requests.
  ...all({ to: 'members', does: 'begin' }, '/begin_weight_update', '/start_weight_update'),
  ...all(
    label,
    '/end_weight_update',
    '/finish_weight_update',
    '/update_weight_version',
    '/weight_transactions/:id/commit'
  ),
  '/weight_transactions': { to: 'members', methods: BOTH, does: 'begin', id: true },
  '/weight_transactions/:id': { to: 'members', methods: GET },
  '/weight_transactions/:id/abort': { to: 'members' }
}

/** What no gateway can do for many engines, and what to do instead. */
export const REFUSED: Readonly<Record<string, string>> = {
  '/remote_instance_weights_info':
    'weights are taken from one engine: name one of /workers in --load-from, not the gateway',
  '/init_weights_send_group_for_remote_instance':
    'weights are taken from one engine: name one of /workers in --load-from, not the gateway',
  '/send_weights_to_remote_instance':
    'weights are taken from one engine: name one of /workers in --load-from, not the gateway',
  '/update_weights_from_peer':
    'engines are filled one by one, and the gateway does that itself for those that missed an update; ask an engine of /workers'
}

/** What nobody has heard of goes to all; what has weights in its name is taken to change them. */
export function unknownCall (path: string, method: string): Call {
  return method !== 'GET' && /weight|lora/.test(path) ? { to: 'members', does: 'weights' } : { to: 'all' }
}

function all (call: Call, ...paths: string[]): Record<string, Call> {
  return Object.fromEntries(paths.map(path => [path, call]))
}
