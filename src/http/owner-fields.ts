import { loraPathField } from './adapters.ts'
import { refused, unused } from './schemas.ts'

// Fields of OpenAI's, vLLM's and SGLang's requests that refit refuses, or accepts because they change no token.
// test/trainers/test_fields.py compares them with the fields in the released servers.

const MEDIA = 'images and other media'
const DISAGGREGATED = 'disaggregated prefill'

/** Engines with several data-parallel ranks; refit's have one. */
export const rankFields = {
  routed_dp_rank: refused('data-parallel ranks', { unless: [0] }),
  data_parallel_rank: refused('data-parallel ranks', { unless: [0] }),
  disagg_prefill_dp_rank: refused('data-parallel ranks', { unless: [0] })
}

export const bootstrapFields = {
  bootstrap_host: refused(DISAGGREGATED),
  bootstrap_room: refused(DISAGGREGATED),
  bootstrap_port: unused('Read only with bootstrap_host.')
}

/** SGLang's controls of image and video processing. */
export const mediaFields = {
  use_audio_in_video: refused(MEDIA),
  video_config: refused(MEDIA),
  images_config: refused(MEDIA),
  max_dynamic_patch: refused(MEDIA),
  min_dynamic_patch: refused(MEDIA),
  mm_processor_kwargs: refused(MEDIA)
}

/** Fields that both /v1/completions and /v1/chat/completions refuse or accept. */
export const otherOpenAiFields = {
  // OpenAI
  user: unused(),
  store: unused('Nothing is stored.'),
  metadata: unused(),
  service_tier: unused(),
  prediction: unused('Predicted text makes nothing faster here.'),
  prompt_cache_key: unused('The prefix cache needs no key; cache_salt keeps its entries apart.'),
  prompt_cache_options: unused(),
  prompt_cache_retention: unused(),
  safety_identifier: unused(),
  // SGLang
  ...rankFields,
  ...bootstrapFields,
  ...mediaFields,
  lora_path: loraPathField,
  session_id: unused('A label for routers.'),
  session_params: refused('sessions'),
  custom_logit_processor: refused('logit processors', { instead: 'use logit_bias' }),
  watermark: refused('watermarks'),
  return_hidden_states: refused('hidden states'),
  return_cached_tokens_details: unused('usage.prompt_tokens_details has cached_tokens in every reply.'),
  return_spec_tokens_details: unused('Counts of guessed tokens are in /metrics (--speculative).'),
  custom_labels: unused('Labels for metrics.'),
  priority: unused('Requests start in the order of arrival.'),
  // vLLM
  use_beam_search: refused('beam search'),
  length_penalty: unused('Only beam search reads it.'),
  logits_processors: refused('logit processors', { instead: 'use logit_bias' }),
  watermarking: refused('watermarks'),
  thinking_token_budget: refused('budgets of thinking'),
  repetition_detection: refused('detection of repetitions'),
  vllm_xargs: refused('arguments for plugins'),
  kv_transfer_params: refused(DISAGGREGATED),
  ec_transfer_params: refused('disaggregated encoders'),
  mm_payload: refused(MEDIA),
  return_mm_kwargs: refused(MEDIA),
  return_token_offsets: refused('offsets of tokens'),
  return_weight_versions: refused('ranges of weight versions', { instead: 'use /inference/v1/generate' }),
  routed_experts_prompt_start: refused('this spelling', { instead: 'use routed_experts_start_len', unless: [0] }),
  request_id: unused('Use rid for an id that /abort_request knows.'),
  stream_interval: unused('Each event has the tokens since the last one.')
}

/** Fields of chat alone. */
export const otherChatFields = {
  // OpenAI
  audio: refused('audio'),
  functions: refused('functions', { instead: 'use tools' }),
  function_call: refused('functions', { instead: 'use tool_choice' }),
  modalities: refused('audio', { unless: [['text']] }),
  moderation: refused('moderation'),
  verbosity: refused('verbosity', { unless: ['medium'] }),
  web_search_options: refused('web search'),
  // SGLang
  thinking: refused('this field', { instead: 'use chat_template_kwargs, such as {"enable_thinking": false}' }),
  task: refused('tasks of DeepSeek-V4'),
  return_flat_raw_output_top_logprobs: refused('flat logprobs', { instead: 'use return_meta_info or logprobs' }),
  return_flat_raw_top_logprobs_b64: unused('Read only with return_flat_raw_output_top_logprobs.'),
  return_input_ids_in_sglext: refused('ids in sglext', { instead: 'use return_token_ids' }),
  return_output_ids_in_sglext: refused('ids in sglext', { instead: 'use return_token_ids' }),
  // vLLM
  best_of: refused('best_of', { unless: [1], instead: 'use n' }),
  chat_template: refused('templates in requests'),
  media_io_kwargs: refused(MEDIA)
}

/** Fields of SGLang's /generate. */
export const otherGenerateFields = {
  ...rankFields,
  ...bootstrapFields,
  ...mediaFields,
  bootstrap_pair_key: refused(DISAGGREGATED),
  decode_tp_size: unused('Read only with bootstrap_host.'),
  input_embeds: refused('embeddings as input'),
  positional_embed_overrides: refused('embeddings as input'),
  image_data: refused('images'),
  video_data: refused('video'),
  audio_data: refused('audio'),
  mm_hashes: refused(MEDIA),
  mm_content_hashes: refused(MEDIA),
  image_max_dynamic_patch: refused(MEDIA),
  video_max_dynamic_patch: refused(MEDIA),
  need_wait_for_mm_inputs: refused(MEDIA),
  num_items_assigned: refused(MEDIA),
  encoder_urls: refused(MEDIA),
  modalities: unused('There are no media.'),
  lora_path: loraPathField,
  lora_id: refused('ids of LoRA adapters', { instead: 'use lora_path' }),
  session_params: refused('sessions'),
  session_id: unused('A label for routers.'),
  custom_logit_processor: refused('logit processors', { instead: 'use sampling_params.logit_bias' }),
  watermark: refused('watermarks'),
  require_reasoning: refused('grammars after reasoning'),
  max_thinking_tokens: refused('budgets of thinking'),
  multi_item_delimiter_indices: refused('scores of many items', { instead: 'send one prompt for each item' }),
  token_indices_to_pool: refused('pooling'),
  return_hidden_states: refused('hidden states'),
  return_entropy: refused('entropies'),
  return_indexer_topk: refused('indexers'),
  return_bytes: refused('bytes of media'),
  return_flat_raw_top_logprobs: refused('flat logprobs', { instead: 'use top_logprobs_num' }),
  return_flat_raw_output_top_logprobs: refused('flat logprobs', { instead: 'use top_logprobs_num' }),
  return_flat_raw_top_logprobs_b64: refused('flat logprobs', { instead: 'use top_logprobs_num' }),
  priority: unused('Requests start in the order of arrival.'),
  no_logs: unused(),
  log_metrics: unused(),
  background: unused(),
  conversation_id: unused(),
  routing_key: unused('For routers.'),
  custom_labels: unused('Labels for metrics.'),
  http_worker_ipc: unused(),
  external_trace_header: unused(),
  received_time: unused(),
  kv_hints: unused('For stores of KV, which this server does not have.')
}

/** Fields of vLLM's sampling parameters. */
export const otherVllmSamplingFields = {
  guided_decoding: refused('this field, which vLLM has removed', { instead: 'use structured_outputs' }),
  truncate_prompt_tokens: refused('truncated prompts', { instead: 'send the ids to keep' }),
  thinking_token_budget: refused('budgets of thinking'),
  repetition_detection: refused('detection of repetitions'),
  trace_decode_token_ids: refused('forced tokens'),
  watermarking: refused('watermarks'),
  extra_args: refused('arguments for plugins'),
  best_of: refused('best_of', { unless: [1], instead: 'use n' }),
  output_kind: unused('`stream` decides it.'),
  flat_logprobs: unused('A form of logprobs inside vLLM.'),
  skip_reading_prefix_cache: unused('Cached prefixes give the same tokens.'),
  stream_interval: unused('Each event has the tokens since the last one.'),
  skip_clone: unused(),
  output_text_buffer_length: unused()
}
