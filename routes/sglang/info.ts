import { Type } from 'typebox'
import { vllmConfig } from '../../src/dialects/vllm/vllm-config.ts'
import type { Adapters } from '../../src/contract/adapters.ts'
import type { RolloutEngine } from '../../src/contract/rollout-engine.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { refusals } from '../../src/http/schemas.ts'
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
const InfoQuery = Type.Object({
  config_format: Type.Optional(Type.String({
    description: "`json`: with `vllm_config`, the engine in vLLM's words. Anything else has no effect."
  }))
})
/** Facts about the server. */
const info: Routes<GenerationContext> = async (app, { context }) => {
  const get = (
    path: string,
    operationId: string,
    summary: string,
    schema: typeof Any | typeof ModelInfo | typeof WeightVersion,
    read: (context: GenerationContext) => unknown
  ): void => {
    app.get(path, {
      config: { auth: 'normal' },
      schema: { operationId, summary, tags: ['info'], response: { 200: schema, ...refusals() } }
    }, async () => read(context))
  }
  get('/model_info', 'modelInfo', 'The model', ModelInfo, modelInfo)
  get('/get_model_info', 'getModelInfo', 'The model (old name)', ModelInfo, modelInfo)
  get('/get_server_info', 'getServerInfo', "The server's settings and state (old name)", Any, serverInfo)
  get('/weight_version', 'weightVersion', 'The weight version', WeightVersion, weightVersion)
  get('/get_weight_version', 'getWeightVersion', 'The weight version (old name)', WeightVersion, weightVersion)
  get('/capabilities', 'capabilities', 'The features of this server', Any, capabilities)

  app.get('/server_info', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'serverInfo',
      summary: "The server's settings and state",
      tags: ['info'],
      querystring: InfoQuery,
      response: { 200: Any, ...refusals() }
    }
  }, async ({ query }) => {
    const config = query.config_format === 'json' && context.dialects.has('vllm')
    return { ...serverInfo(context), ...config ? { vllm_config: vllmConfig(context) } : {} }
  })
}

function modelInfo ({ engine, loaded }: GenerationContext): Record<string, unknown> {
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

function weightVersion ({ engine }: GenerationContext): Record<string, unknown> {
  return { weight_version: engine.weightVersion }
}

function serverInfo (context: GenerationContext): Record<string, unknown> {
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
    ...loraInfo(engine),
    // SGLang's flag, which slime compares with its own settings. refit releases and resumes memory without it.
    enable_memory_saver: false,
    max_running_requests: info.maxRunningRequests,
    max_queued_requests: info.maxQueuedRequests,
    max_total_num_tokens: info.kvTokens,
    sampling_defaults: context.samplingDefaults,
    max_req_input_len: info.contextLength - 1,
    status: engine.closed || engine.weights.state !== 'current' || transactions.writing ? 'not ready' : 'ready',
    weights: engine.weights.state,
    weight_sets: weightSets(engine),
    weight_coverage: toCoverage(engine.coverage),
    weight_transaction: current === null ? null : toTransaction(current),
    weight_groups: context.groups.list.map(({ worldSize, ...group }) => ({ ...group, world_size: worldSize })),
    released_memory: engine.releasedMemory,
    enable_weights_cpu_backup: info.weightsCpuBackup,
    enable_deterministic_inference: info.deterministic,
    speculative: info.speculative === undefined ? 'off' : 'siblings',
    speculative_num_draft_tokens: info.speculative?.draftTokens ?? null,
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

function capabilities ({ engine, tokenizer, version, maxBatch, dialects }: GenerationContext): Record<string, unknown> {
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
    adapters: engine.adapters === undefined ? null : toLimits(engine.adapters),
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

/** SGLang's settings of adapters; its number of slots counts the base model as one. */
function loraInfo ({ adapters }: GenerationContext['engine']): Record<string, unknown> {
  if (adapters === undefined) return { enable_lora: false }
  const { slots, maxRank, maxLoaded, targets } = adapters.limits
  return {
    enable_lora: true,
    max_loras_per_batch: slots + 1,
    max_loaded_loras: maxLoaded,
    max_lora_rank: maxRank,
    lora_target_modules: [...targets],
    lora_paths: adapters.list().map(({ name, path, pinned }) => ({ lora_name: name, lora_path: path, pinned }))
  }
}

function toLimits ({ limits }: Adapters): Record<string, unknown> {
  const { slots, maxRank, maxLoaded, targets } = limits
  return { slots, max_rank: maxRank, max_loaded: maxLoaded, target_modules: [...targets] }
}

/** Null unless the engine records which experts tokens are routed to. */
function toExperts ({ experts }: GenerationContext['engine']['info']): Record<string, unknown> | null {
  return experts === undefined
    ? null
    : { layers: experts.layers, sparse_layers: experts.sparse, experts: experts.experts, per_token: experts.perToken }
}

export default info

function weightSets ({ weightSets: sets }: Pick<RolloutEngine, 'weightSets'>): object | null {
  if (sets === undefined) return null
  const { live, oldRequests, shadow: { secondsLeft, ...shadow } } = sets
  return { live, old_requests: oldRequests, shadow: { ...shadow, seconds_left: secondsLeft } }
}
