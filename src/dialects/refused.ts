/** Routes of released vLLM and SGLang servers that refit does not serve, and the reason. */
export interface RefusedRoutes {
  owner: 'SGLang' | 'vLLM' | 'both'
  /** "METHOD METHOD /path"; parameters of a path are in braces. */
  routes: readonly string[]
  reason: string
}

// A test compares this list and the served routes with the newest releases; docs/compatibility.md is written from it.
export const REFUSED: readonly RefusedRoutes[] = [
  {
    owner: 'both',
    routes: [
      'POST /v1/embeddings',
      'POST PUT /v1/rerank',
      'POST /v1/score',
      'POST PUT /classify',
      'POST /rerank',
      'POST /v2/rerank',
      'POST /v2/embed',
      'POST /score',
      'POST /pooling',
      'POST /generative_scoring',
      'POST /v1/classify',
      'POST PUT /encode'
    ],
    reason: 'refit serves models that generate; it has no embeddings, classes or scores of pairs'
  },
  {
    owner: 'both',
    routes: [
      'GET /v1/responses/{response_id}',
      'POST /v1/responses/{response_id}/cancel',
      'POST /v1/responses/render',
      'POST /v1/messages/render',
      'POST /cohere/v2/chat',
      'POST /cohere/v2/chat/render',
      'POST /v1/chat/completions/batch',
      'POST /v1/systemone',
      'POST /v1/decisions',
      'POST /invocations'
    ],
    reason: 'use /v1/chat/completions, /v1/completions or /generate'
  },
  {
    owner: 'vLLM',
    routes: [
      'POST /v1/chat/completions/derender',
      'POST /v1/completions/derender',
      'POST /v1/completions/render',
      'GET /tokenizer_info'
    ],
    reason: 'use /v1/chat/completions/render, /tokenize and /detokenize'
  },
  {
    owner: 'both',
    routes: ['POST /v1/audio/transcriptions', 'POST /v1/audio/translations', 'GET /v1/realtime'],
    reason: 'refit serves text; it has no audio'
  },
  {
    owner: 'SGLang',
    routes: ['GET POST /open_session', 'GET POST /close_session'],
    reason: 'sessions are not stored; requests with the same beginning share the prefix cache without one'
  },
  {
    owner: 'SGLang',
    routes: ['POST PUT /set_internal_state', 'GET POST /slow_down', 'GET POST /freeze_gc'],
    reason: 'settings are read once, at the start, and there is no Python whose garbage collector could be frozen'
  },
  {
    owner: 'SGLang',
    routes: ['GET POST /configure_logging', 'GET POST /set_trace_level', 'POST /dumper/{method}'],
    reason: 'the log is set by --log-level, and /metrics has times of steps and updates'
  },
  {
    owner: 'SGLang',
    routes: ['GET /start_profile', 'GET /stop_profile'],
    reason: 'refit has no profiler of its own: run the server under one (nsys profile refit serve ...)'
  },
  {
    owner: 'SGLang',
    routes: [
      'GET POST /start_expert_distribution_record',
      'GET POST /stop_expert_distribution_record',
      'GET POST /dump_expert_distribution_record'
    ],
    reason: 'experts are reported for each request: return_routed_experts'
  },
  {
    owner: 'both',
    routes: [
      'POST /scale_elastic_ep',
      'GET POST /is_scaling_elastic_ep',
      'POST /fault_tolerance/apply',
      'GET /fault_tolerance/status',
      'POST /pd_role_switch'
    ],
    reason: 'an engine has the ranks that it was started with; refit gateway adds and removes engines (/workers)'
  },
  {
    owner: 'both',
    routes: [
      'GET PUT DELETE /hicache/storage-backend',
      'POST /hicache/storage-backend/clear',
      'GET /get_hicache_l3_cache_layout',
      'GET /kv_event_sources'
    ],
    reason: 'KV caches stay in the memory of their GPU, and publish no events'
  },
  {
    owner: 'SGLang',
    routes: ['POST /add_external_corpus', 'GET /list_external_corpora', 'POST /remove_external_corpus'],
    reason: 'guesses come from outputs of the same prompt (--speculative siblings), not from a corpus'
  }
]

/** The routes of an entry, one for each method. */
export function eachRoute ({ routes }: RefusedRoutes): { method: string, path: string }[] {
  return routes.flatMap(route => {
    const words = route.split(' ')
    return words.slice(0, -1).map(method => ({ method, path: words.at(-1)! }))
  })
}
