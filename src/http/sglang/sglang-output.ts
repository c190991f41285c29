import type { FinishReason, Scored } from '../../contract/rollout-engine.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import { sglangExperts } from './routed-experts.ts'
import type { WantedExperts } from './routed-experts.ts'
import type { Sample } from '../sample.ts'

export interface OutputOptions {
  /** null for a reply without text. */
  tokenizer: Tokenizer | null
  logprobs: boolean
  top: boolean
  ids: boolean
  /** Add the texts of tokens to their logprobs. */
  texts: boolean
  promptIds: boolean
  /** null: not requested. */
  experts: WantedExperts | null
}

/** [logprob, token id, text or null]; JSON has no -Infinity, so a banned token's logprob is null. */
type WireLogprob = [number | null, number, string | null]

/** The number of tokens and characters in earlier events, and whether those had the prompt's logprobs. */
export interface Shown {
  tokens: number
  text: number
  input: boolean
}

export const NOTHING_SHOWN: Shown = { tokens: 0, text: 0, input: false }

/** One sample as `/generate` returns it: everything so far, without the part that earlier events have shown. */
export function sglangOutput (sample: Sample, options: OutputOptions, shown = NOTHING_SHOWN): Record<string, unknown> {
  return {
    ...options.tokenizer === null ? {} : { text: sample.text.slice(shown.text) },
    output_ids: sample.tokens.slice(shown.tokens),
    ...options.promptIds ? { prompt_token_ids: Array.from(sample.promptIds) } : {},
    meta_info: {
      id: sample.rid,
      finish_reason: finishReason(sample.finish),
      prompt_tokens: sample.promptTokens,
      weight_version: sample.weightVersion,
      weight_versions: sample.spans.map(span => ({ ...span })),
      num_retractions: sample.retractions,
      ...options.logprobs ? logprobs(sample, options, shown) : {},
      reasoning_tokens: 0,
      completion_tokens: sample.tokens.length,
      cached_tokens: sample.cachedTokens,
      seed: sample.seed === null ? null : String(sample.seed),
      ...experts(sample, options),
      ...sample.finish === null ? {} : { e2e_latency: sample.seconds, response_sent_to_client_ts: Date.now() / 1000 }
    }
  }
}

function finishReason (finish: FinishReason | null): unknown {
  return finish?.type === 'abort' ? { ...finish, status_code: null, err_type: null } : finish
}

function experts (sample: Sample, { experts: wanted }: OutputOptions): Record<string, unknown> {
  const rows = sglangExperts(sample, wanted)
  return rows === undefined ? {} : { routed_experts: rows, routed_experts_start_len: wanted!.from }
}

function logprobs (
  sample: Sample,
  { tokenizer, top, ids, texts }: OutputOptions,
  shown: Shown
): Record<string, unknown> {
  const input = shown.input ? null : sample.input
  const text = (id: number): string | null => texts && tokenizer !== null ? tokenizer.idToText(id) : null
  const wire = ([logprob, id]: readonly [number | null, number]): WireLogprob => [logprob, id, text(id)]
  const rows = (list: (Scored[] | null)[] = []): unknown[] => list.map(row => row === null ? null : row.map(wire))
  return {
    input_token_logprobs: input?.logprobs.map(wire) ?? [],
    output_token_logprobs: sample.logprobs.slice(shown.tokens).map(wire),
    output_token_logprobs_length: sample.logprobs.length,
    ...top ? { input_top_logprobs: rows(input?.top), output_top_logprobs: rows(sample.top.slice(shown.tokens)) } : {},
    ...ids
      ? { input_token_ids_logprobs: rows(input?.ids), output_token_ids_logprobs: rows(sample.ids.slice(shown.tokens)) }
      : {}
  }
}
