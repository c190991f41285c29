import { Type } from 'typebox'
import type { Scored, ScoredRows } from '../../contract/rollout-engine.ts'
import { VersionStamps } from '../../http/generation/bound-version.ts'
import { chatLogprobs } from '../../http/openai/chat-logprobs.ts'
import { finite, Usage } from '../../http/openai/openai-output.ts'
import { promptLogprobs, PromptLogprobs } from '../../http/openai/prompt-logprobs.ts'
import type { WantedExperts } from '../../http/generation/routed-experts.ts'
import type { Sample } from '../../http/generation/sample.ts'
import { amongKept } from '../../http/generation/sampling-mask.ts'
import { nullable } from '../../http/schemas.ts'
import { LazyList } from '../../http/json-parts.ts'
import { encodeNpy } from '../../wire/npy.ts'
import type { Tokenizer } from '../../text/tokenizer.ts'
import { VllmExperts, vllmExperts } from '../routed-experts.ts'
import type { ExpertsForm } from '../routed-experts.ts'

export interface VllmOutput {
  /** For replies with text; null for token ids only. */
  tokenizer: Tokenizer | null
  /** Number of best tokens for output and prompt; null for no scores. */
  best: { output: number | null, prompt: number | null }
  /** Null if the engine records none. */
  experts: { wanted: WantedExperts, form: ExpertsForm } | null
  masks: boolean
  /** Ids that are scored at positions of the prompt; null for none. */
  scores: ScoredRows | null
}

const Scores = {
  token: Type.String({ description: '"token_id:<id>", as in older vLLM versions; the text in mode `text`.' }),
  token_id: Type.Optional(Type.Integer()),
  logprob: Type.Number(),
  rank: nullable(Type.Integer(), '1 is the best; null if the token is none of the requested best ones.'),
  bytes: nullable(Type.Array(Type.Integer()), 'In mode `text`.')
}

const Span = Type.Object({ version: Type.String(), start: Type.Integer(), end: Type.Integer() })

const Choice = Type.Object({
  index: Type.Integer(),
  finish_reason: nullable(Type.String(), 'stop, length or abort.'),
  stop_reason: nullable(Type.Union([Type.String(), Type.Integer()]), 'The text or token that ended the output.'),
  token_ids: Type.Array(Type.Integer()),
  text: Type.Optional(Type.String()),
  logprobs: nullable(
    Type.Object({
      content: Type.Array(Type
        .Object({
          ...Scores,
          top_logprobs: Type.Array(Type.Object(Scores), {
            description: 'The token itself, then the other best ones.'
          })
        }))
    })
  ),
  weight_versions: Type.Optional(
    Type.Array(Span, { description: 'Weight version of each range [start, end) of output tokens.' })
  ),
  routed_experts: VllmExperts,
  sampling_mask: nullable(
    Type.Array(Type.Array(Type.Integer())),
    'On servers with --enable-return-sampling-mask, not in streams: per token the ids that top_k, top_p and min_p ' +
      'kept, best first. Null if nothing bounds them.'
  )
})

export const VllmGenerateReply = Type.Object({
  request_id: Type.String(),
  model: Type.String(),
  created: Type.Integer(),
  output_mode: Type.String(),
  choices: Type.Array(Choice),
  usage: Usage,
  prompt_logprobs: PromptLogprobs,
  prompt_token_ids: nullable(Type.Array(Type.Integer())),
  ...VersionStamps,
  prompt_token_id_logprobs: nullable(
    Type.String(),
    'Base64 of a .npy file: float32 [rows, ids], the scores of `prompt_logprob_token_ids`; -Infinity for -1.'
  ),
  metrics: Type.Null(),
  kv_transfer_params: Type.Null()
}, { title: 'VllmGenerateReply' })

/** The part of a sample after the `tokens` tokens and `text` characters that were sent already. */
export function vllmChoice (
  sample: Sample,
  index: number,
  { tokenizer, best, experts, masks }: VllmOutput,
  sent = { tokens: 0, text: 0 }
): Record<string, unknown> {
  return {
    index,
    finish_reason: sample.finish?.type ?? null,
    stop_reason: sample.finish?.type === 'stop' ? sample.finish.matched : null,
    token_ids: sample.tokens.slice(sent.tokens),
    ...tokenizer === null ? {} : { text: sample.text.slice(sent.text) },
    logprobs: best.output === null
      ? null
      : tokenizer === null
      ? tokenLogprobs(sample, sent.tokens, best.output)
      : chatLogprobs(sample, sent.tokens, { tokenizer, asIds: false, best: best.output }, amongKept),
    ...sample.finish === null ? {} : { weight_versions: sample.spans.map(span => ({ ...span })) },
    routed_experts: experts === null ? null : vllmExperts(sample, experts),
    sampling_mask: masks ? new LazyList(sample.kept.length, i => Array.from(sample.kept[i]!.ids)) : null
  }
}

export function vllmPromptLogprobs (samples: Sample[], { best, tokenizer }: VllmOutput): unknown {
  return best.prompt === null ? null : promptLogprobs(samples[0]!, best.prompt, tokenizer)
}

/** Base64 of a .npy file with the scores of chosen ids; null if there are none. */
export function scoresNpy ({ scores }: Sample, rows: ScoredRows | null): string | null {
  if (rows === null || scores === null) return null
  return encodeNpy(scores, scores.length / rows.width, rows.width).toString('base64')
}

/** By token id: the token itself, the best ones at its position, then the ones that were requested by id. */
function tokenLogprobs (sample: Sample, from: number, best: number): object {
  const content = new LazyList(sample.logprobs.length - from, i => {
    const change = amongKept(sample, from + i)
    const own = change(sample.logprobs.at(from + i))
    const top = sample.top.at(from + i).slice(0, best).map(change)
    const ranks = new Map(top.map(([, id], at) => [id, at + 1]))
    const wire = ([logprob, id]: Scored): object => ({
      token: `token_id:${id}`,
      token_id: id,
      logprob: finite(logprob),
      rank: ranks.get(id) ?? null
    })
    const each = new Map<number, Scored>()
    for (const scored of [own, ...top, ...sample.ids.at(from + i).map(change)]) {
      if (!each.has(scored[1])) each.set(scored[1], scored)
    }
    return { ...wire(own), top_logprobs: [...each.values()].map(wire) }
  })
  return { content }
}
