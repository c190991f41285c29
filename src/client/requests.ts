/** `sampling_params` of a generate request. null and absent fields mean the server's default. */
export interface SamplingRequest {
  max_new_tokens?: number | null
  min_new_tokens?: number | null
  n?: number | null
  temperature?: number | null
  top_p?: number | null
  top_k?: number | null
  min_p?: number | null
  frequency_penalty?: number | null
  presence_penalty?: number | null
  repetition_penalty?: number | null
  stop?: string | string[] | null
  stop_token_ids?: number[] | null
  ignore_eos?: boolean | null
  no_stop_trim?: boolean | null
  skip_special_tokens?: boolean | null
  spaces_between_special_tokens?: boolean | null
  logit_bias?: Record<string, number> | null
  sampling_seed?: number | string | null
  stream_interval?: number | null
}

/** Body of `/generate`. Lists have one entry for each prompt. */
export interface GenerateRequestBody {
  /** Exactly one of `text` and `input_ids`. */
  text?: string | string[] | null
  input_ids?: number[] | number[][] | null
  sampling_params?: SamplingRequest | SamplingRequest[] | null
  rid?: string | Array<string | null> | null
  return_logprob?: boolean | boolean[] | null
  logprob_start_len?: number | number[] | null
  top_logprobs_num?: number | number[] | null
  token_ids_logprob?: number[] | Array<number[] | null> | null
  token_ids_logprob_positions?: number[][] | null
  return_text_in_logprobs?: boolean | null
  return_raw_logprobs?: boolean | null
  return_prompt_token_ids?: boolean | null
  stream_deltas?: boolean | null
  extra_key?: string | string[] | null
  return_routed_experts?: boolean | null
  return_sampling_mask?: boolean | boolean[] | null
  routed_experts_start_len?: number | null
  receipt?: boolean | null
  [field: string]: unknown
}

/** Body of `/update_weights_from_disk`. */
export interface DiskUpdateRequest {
  /** A folder, a .safetensors file or an index, inside the server's allowed roots. */
  model_path: string
  load_format?: 'auto' | 'safetensors' | null
  weight_version?: string | null
  flush_cache?: boolean
  abort_all_requests?: boolean
  /** Whether tensors of the model may be missing (default: only in a transaction). */
  allow_missing?: boolean | null
  transaction?: string | null
  /** How it reaches the weights (docs/updates.md); default `auto`. */
  swap?: 'auto' | 'in_place' | 'demand' | null
  /** Whether requests that have started finish on the old weights (docs/updates.md); default `continue`. */
  on_running?: 'continue' | 'finish_old' | null
}
