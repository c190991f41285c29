import type { Adapters } from '../../contract/adapters.ts'
import type { GenerationContext } from '../../http/context.ts'

/**
 * The engine in the words of vLLM's VllmConfig, as its `/server_info?config_format=json` shows it: the fields that are
 * true of refit. TRL reads the dtype of the weights, and whether weights can be transferred and adapters loaded.
 */
export function vllmConfig (
  { engine: { info, adapters }, loaded, tokenizer }: GenerationContext
): Record<string, unknown> {
  const device = info.gpus.length > 0 ? 'cuda' : 'cpu'
  return {
    model_config: {
      model: loaded.modelPath,
      tokenizer: info.modelPath,
      skip_tokenizer_init: tokenizer === null,
      served_model_name: info.servedModelName,
      // torch's spelling.
      dtype: `torch.${info.dtype}`,
      max_model_len: info.contextLength,
      quantization: null,
      logprobs_mode: 'processed_logprobs',
      enable_sleep_mode: true
    },
    cache_config: { enable_prefix_caching: true, kv_cache_size_tokens: info.kvTokens },
    parallel_config: {
      tensor_parallel_size: info.ranks,
      pipeline_parallel_size: 1,
      data_parallel_size: 1,
      world_size: info.ranks,
      nnodes: 1,
      node_rank: 0
    },
    scheduler_config: { max_num_seqs: info.maxRunningRequests },
    device_config: { device_type: device },
    load_config: { load_format: loaded.loadFormat },
    lora_config: adapters === undefined ? null : loraConfig(adapters),
    speculative_config: info.speculative === undefined
      ? null
      : { method: 'siblings', num_speculative_tokens: info.speculative.draftTokens },
    quant_config: null,
    // The backend of broadcasts. CUDA IPC and disk need none.
    weight_transfer_config: { backend: device === 'cuda' ? 'nccl' : 'gloo' }
  }
}

function loraConfig ({ limits: { slots, maxRank, maxLoaded, targets } }: Adapters): Record<string, unknown> {
  return {
    max_lora_rank: maxRank,
    max_loras: slots,
    max_cpu_loras: maxLoaded,
    fully_sharded_loras: false,
    lora_dtype: 'auto',
    target_modules: [...targets]
  }
}
