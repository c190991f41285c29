import type { FinishReason, Rows, Scored, ScoredRows } from '../../contract/rollout-engine.ts'
import { stampsOf } from '../generation/bound-version.ts'
import { LazyList } from '../json-parts.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import { sglangExperts } from '../generation/routed-experts.ts'
import type { WantedExperts } from '../generation/routed-experts.ts'
import type { Sample } from '../generation/sample.ts'
import { sglangMasks } from '../generation/sampling-mask.ts'
import type { WantedMasks } from '../generation/sampling-mask.ts'

export interface OutputOptions {
  /** null for a reply without text. */
  tokenizer: Tokenizer | null
  logprobs: boolean
  top: boolean
  ids: boolean
  /** Ids of each position of the prompt; null for none. */
  positions: ScoredRows | null
  /** Add the texts of tokens to their logprobs. */
  texts: boolean
  promptIds: boolean
  /** null: not requested. */
  experts: WantedExperts | null
  masks: WantedMasks
  /** null: the engine is the only one at its address. */
  dpRank: number | null
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
      ...stampsOf([sample]),
      ...sample.lora === undefined ? {} : { lora: sample.lora },
      num_retractions: sample.retractions,
      dp_rank: options.dpRank,
      ...options.logprobs ? logprobs(sample, options, shown) : {},
      reasoning_tokens: 0,
      completion_tokens: sample.tokens.length,
      cached_tokens: sample.cachedTokens,
      seed: sample.seed === null ? null : String(sample.seed),
      ...experts(sample, options),
      ...sglangMasks(sample, shown.tokens, options.masks),
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
  { tokenizer, top, ids, positions, texts }: OutputOptions,
  shown: Shown
): Record<string, unknown> {
  const input = shown.input ? null : sample.input
  const text = (id: number): string | null => texts && tokenizer !== null ? tokenizer.idToText(id) : null
  const wire = ([logprob, id]: readonly [number | null, number]): WireLogprob => [logprob, id, text(id)]
  const row = (scores: Scored[] | null | undefined): WireLogprob[] | null => scores?.map(wire) ?? null
  const rows = (table: Rows<Scored[] | null> = [], from = 0): LazyList =>
    new LazyList(table.length - from, i => row(table.at(from + i)))
  return {
    input_token_logprobs: input === null
      ? []
      : new LazyList(input.logprobs.length, i => wire(input.logprobs.at(i)!)),
    output_token_logprobs: new LazyList(
      sample.logprobs.length - shown.tokens,
      i => wire(sample.logprobs.at(shown.tokens + i))
    ),
    output_token_logprobs_length: sample.logprobs.length,
    ...top ? { input_top_logprobs: rows(input?.top), output_top_logprobs: rows(sample.top, shown.tokens) } : {},
    ...positions === null || input === null ? {} : {
      input_token_ids_logprobs: new LazyList(
        input.logprobs.length,
        i => row(positionRow(sample, positions, input.logprobs.length, i))
      )
    },
    ...ids
      ? { input_token_ids_logprobs: rows(input?.ids), output_token_ids_logprobs: rows(sample.ids, shown.tokens) }
      : {}
  }
}

/** The scores of one of the last `count` positions of a prompt; null for its first token. */
function positionRow (
  { scores, promptIds }: Sample,
  { from, width, ids }: ScoredRows,
  count: number,
  i: number
): Scored[] | null {
  const row = promptIds.length - count + i - from
  if (row < 0 || scores === null) return null
  const own = ids.subarray(row * width, (row + 1) * width)
  return Array.from(own.subarray(0, own.includes(-1) ? own.indexOf(-1) : width), (id, j): Scored => [
    scores[row * width + j]!,
    id
  ])
}
