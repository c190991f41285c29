import { Type } from 'typebox'
import type { RouteContext, Routes } from '../../src/http/context.ts'
import { nullable, refusals } from '../../src/http/schemas.ts'
import { toCoverage, toTransaction } from '../../src/http/updates/transaction-status.ts'

const ModelInfo = Type.Object({
  model_path: Type.String({ description: 'The path that the current weights were loaded from.' }),
  tokenizer_path: Type.String(),
  is_generation: Type.Boolean(),
  preferred_sampling_params: Type.Null(),
  weight_version: Type.String(),
  has_image_understanding: Type.Boolean(),
  has_audio_understanding: Type.Boolean(),
  model_type: Type.String(),
  architectures: Type.Array(Type.String())
}, { title: 'ModelInfo', description: 'The model.' })

const Any = Type.Object({}, { additionalProperties: true, description: 'See the field names.' })
const WeightVersion = Type.Object({ weight_version: Type.String() }, {
  title: 'WeightVersion',
  description: 'Label of the current weights.'
})
const LoadsQuery = Type.Object({
  include: nullable(Type.String(), 'Has no effect.'),
  dp_rank: nullable(Type.String(), 'Has no effect.'),
  format: Type.Optional(Type.Union([Type.Literal('json'), Type.Literal('prometheus')]))
})

/** Facts about the server, and its load. */
const info: Routes = async (app, { context }) => {
  const get = (
    path: string,
    operationId: string,
    summary: string,
    schema: typeof Any | typeof ModelInfo | typeof WeightVersion,
    read: (context: RouteContext) => unknown
  ): void => {
    app.get(path, {
      config: { auth: 'normal' },
      schema: { operationId, summary, tags: ['info'], response: { 200: schema, ...refusals() } }
    }, async () => read(context))
  }
  get('/model_info', 'modelInfo', 'The model', ModelInfo, modelInfo)
  get('/get_model_info', 'getModelInfo', 'The model (old name)', ModelInfo, modelInfo)
  get('/server_info', 'serverInfo', "The server's settings and state", Any, serverInfo)
  get('/get_server_info', 'getServerInfo', "The server's settings and state (old name)", Any, serverInfo)
  get('/weight_version', 'weightVersion', 'The weight version', WeightVersion, weightVersion)
  get('/get_weight_version', 'getWeightVersion', 'The weight version (old name)', WeightVersion, weightVersion)
  get('/capabilities', 'capabilities', 'The features of this server', Any, capabilities)

  app.get('/get_load', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'getLoad',
      summary: 'Load of the server (old form)',
      tags: ['info'],
      response: { 200: Type.Array(Any, { description: 'One entry, because there is one replica.' }), ...refusals() }
    }
  }, async () => {
    const { running, queued, usedTokens } = context.engine.stats
    return [{
      dp_rank: 0,
      num_reqs: running + queued,
      num_waiting_reqs: queued,
      num_tokens: usedTokens,
      num_pending_tokens: 0,
      ts_tic: Date.now() / 1000
    }]
  })

  app.get('/v1/loads', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'loads',
      summary: 'Load of the server',
      tags: ['info'],
      querystring: LoadsQuery,
      response: {
        200: {
          content: {
            'application/json': { schema: Any },
            'text/plain': { schema: Type.String() }
          },
          description: 'One entry, because there is one replica.'
        },
        ...refusals()
      }
    }
  }, async (request, reply) => {
    const load = loadOf(context)
    if (request.query.format !== 'prometheus') {
      return {
        timestamp: new Date().toISOString(),
        version: context.version,
        loads: [load]
      }
    }
    const lines = Object.entries(load).filter(([name]) => name !== 'dp_rank').map(([name, value]) =>
      `refit:load_${name}{dp_rank="0"} ${value}`
    )
    return reply.type('text/plain; version=0.0.4; charset=utf-8').send(lines.join('\n') + '\n')
  })
}

function modelInfo ({ engine, loaded }: RouteContext): Record<string, unknown> {
  return {
    model_path: loaded.modelPath,
    tokenizer_path: engine.info.modelPath,
    is_generation: true,
    preferred_sampling_params: null,
    weight_version: engine.weightVersion,
    has_image_understanding: false,
    has_audio_understanding: false,
    model_type: engine.info.modelType,
    architectures: [engine.info.architecture]
  }
}

function weightVersion ({ engine }: RouteContext): Record<string, unknown> {
  return { weight_version: engine.weightVersion }
}

function serverInfo (context: RouteContext): Record<string, unknown> {
  const { engine, loaded, tokenizer } = context
  const { info, stats, transactions } = engine
  const { current } = transactions
  const gigabytes = (bytes: number): number => Number((bytes / 2 ** 30).toFixed(3))
  return {
    model_path: loaded.modelPath,
    tokenizer_path: info.modelPath,
    served_model_name: info.servedModelName,
    load_format: loaded.loadFormat,
    weight_version: engine.weightVersion,
    skip_tokenizer_init: tokenizer === null,
    context_length: info.contextLength,
    device: info.device,
    cards: info.gpus,
    isa: info.isa,
    threads: info.threads,
    dtype: info.dtype,
    tp_size: info.ranks,
    dp_size: 1,
    pp_size: 1,
    ep_size: 1,
    moe_dp_size: 1,
    nnodes: 1,
    node_rank: 0,
    encoder_only: false,
    // SGLang's spelling of "none".
    disaggregation_mode: 'null',
    enable_lora: false,
    // SGLang's flag, which slime compares with its own settings. refit releases and resumes memory without it.
    enable_memory_saver: false,
    max_running_requests: info.maxRunningRequests,
    max_queued_requests: info.maxQueuedRequests,
    max_total_num_tokens: info.kvTokens,
    max_req_input_len: info.contextLength - 1,
    status: engine.closed || engine.weights.state !== 'current' || transactions.writing ? 'not ready' : 'ready',
    weights: engine.weights.state,
    weight_coverage: toCoverage(engine.coverage),
    weight_transaction: current === null ? null : toTransaction(current),
    weight_groups: context.groups.list.map(({ worldSize, ...group }) => ({ ...group, world_size: worldSize })),
    released_memory: engine.releasedMemory,
    enable_weights_cpu_backup: info.weightsCpuBackup,
    enable_return_routed_experts: info.experts !== undefined,
    internal_states: [{
      last_gen_throughput: stats.tokensPerSecond,
      memory_usage: {
        weight: gigabytes(info.weightBytes),
        kvcache: gigabytes(info.kvBytes),
        token_capacity: info.kvTokens,
        graph: 0
      },
      effective_max_running_requests_per_dp: info.maxRunningRequests
    }],
    started_at: context.startedAt,
    version: context.version,
    kv_events: null
  }
}

function loadOf ({ engine }: RouteContext): Record<string, number> {
  const { info, stats } = engine
  return {
    dp_rank: 0,
    num_running_reqs: stats.running,
    num_waiting_reqs: stats.queued,
    num_total_reqs: stats.running + stats.queued,
    num_used_tokens: stats.usedTokens,
    num_total_tokens: stats.usedTokens,
    max_total_num_tokens: info.kvTokens,
    max_running_requests: info.maxRunningRequests,
    token_usage: info.kvTokens === 0 ? 0 : stats.usedTokens / info.kvTokens,
    gen_throughput: stats.tokensPerSecond
  }
}

function capabilities ({ engine, tokenizer, version, maxBatch, dialects }: RouteContext): Record<string, unknown> {
  return {
    server: 'refit',
    version,
    model: {
      architecture: engine.info.architecture,
      model_type: engine.info.modelType,
      vocab_size: engine.info.vocabSize,
      eos_token_ids: engine.info.eosTokenIds,
      weight_bytes: engine.info.weightBytes,
      routed_experts: toExperts(engine.info)
    },
    weights: {
      sources: ['disk'],
      checker: ['checksum', 'snapshot', 'reset_tensors', 'compare'],
      ranks: engine.info.ranks,
      transactions: true
    },
    memory: { tags: ['weights', 'kv_cache', 'cuda_graph'], weights_cpu_backup: engine.info.weightsCpuBackup },
    pause_modes: ['abort', 'retract', 'in_place'],
    generation: {
      text: tokenizer !== null,
      chat: tokenizer?.hasChatTemplate ?? false,
      logprobs: true,
      stream: true,
      stream_deltas: true,
      batch: maxBatch
    },
    dialects: ['sglang', 'openai', ...dialects]
  }
}

/** Null unless the engine records which experts tokens are routed to. */
function toExperts ({ experts }: RouteContext['engine']['info']): Record<string, unknown> | null {
  return experts === undefined
    ? null
    : { layers: experts.layers, sparse_layers: experts.sparse, experts: experts.experts, per_token: experts.perToken }
}

export default info
