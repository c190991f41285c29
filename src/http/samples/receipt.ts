import { createHash } from 'node:crypto'
import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { EngineInfo } from '../../contract/rollout-engine.ts'
import type { Grammar } from '../../contract/grammar.ts'
import { SamplingFields } from '../generation/sampling.ts'
import { nullable } from '../schemas.ts'
import type { KeptSample } from './kept-samples.ts'

const Span = Type.Object({ version: Type.String(), start: Type.Integer(), end: Type.Integer() })

export const Receipt = Type.Object({
  receipt: Type.Literal(1, { description: 'Version of this form.' }),
  id: Type.String(),
  ended: Type.Number({ description: 'Seconds since 1970.' }),
  program: Type.String({ description: 'Version of refit.' }),
  model: Type.Object({ name: Type.String(), architecture: Type.String() }),
  device: Type.Object({
    kind: Type.String({ description: 'cpu or cuda.' }),
    gpus: Type.Array(Type.String()),
    isa: Type.String({ description: 'Instruction set of the kernels on the CPU.' }),
    dtype: Type.String(),
    ranks: Type.Integer(),
    exact: Type.Boolean({
      description: 'The same request gives the same bits again, whatever runs beside it: on the CPU, and on GPUs ' +
        'with --deterministic.'
    }),
    any_ranks: Type.Optional(Type.Boolean({
      description: 'These bits are the same on any number of ranks: with --deterministic, and on a CPU with one rank.'
    }))
  }),
  prompt_ids: Type.Array(Type.Integer()),
  output_ids: Type.Array(Type.Integer()),
  logprobs: Type.Union([Type.Array(Type.Union([Type.Number(), Type.Null()])), Type.Null()], {
    description: 'Of the output; null if the request wanted none.'
  }),
  raw_logprobs: Type.Boolean(),
  finish_reason: Type.Object({ type: Type.String() }),
  sampling_params: Type.Object(SamplingFields.properties, {
    description: "As in /generate. `sampling_seed` is the request's, or the one that the server drew."
  }),
  unrepeatable: Type.Array(Type.String(), {
    description: 'What shaped the sample and cannot be written as a request for /generate.'
  }),
  weight_versions: Type.Array(Span),
  weights: Type.Object({
    digest: nullable(Type.String(), 'SHA-256 over the checksums of all tensors; null if it is not known.'),
    state: Type.Union([Type.Literal('current'), Type.Literal('gone'), Type.Literal('mixed')], {
      description:
        'current: the engine still holds these weights. gone: they were replaced; the digest is known only ' +
        'if it was requested before. mixed: weights were written while the request was under way.'
    })
  }),
  lora: Type.Union([
    Type.Object({ name: Type.String(), version: Type.Integer(), digest: Type.Optional(Type.String()) }),
    Type.Null()
  ]),
  cached_tokens: Type.Integer(),
  retractions: Type.Integer(),
  seal: Type.String({ description: 'SHA-256 of everything else: it finds accidents and edits, and is no signature.' })
}, { title: 'Receipt', description: 'What made a sample.' })

export type Receipt = Static<typeof Receipt>

/** `digest`: of the weights that made the sample, if it is known; `epoch`: of the engine's weights now. */
export function toReceipt (
  sample: KeptSample,
  { info, program, epoch, digest }: { info: EngineInfo, program: string, epoch: number, digest: string | null }
): Receipt {
  return sealed({
    receipt: 1,
    id: sample.id,
    ended: sample.endedAt / 1000,
    program,
    model: { name: info.servedModelName, architecture: info.architecture },
    device: {
      kind: info.device,
      gpus: info.gpus.map(({ name }) => name),
      isa: info.isa,
      dtype: info.dtype,
      ranks: info.ranks,
      // Neither the GPU nor the version of a remote engine is known here.
      exact: info.deterministic && info.device !== 'remote',
      any_ranks: info.deterministicAcrossRanks && info.device !== 'remote'
    },
    prompt_ids: Array.from(sample.promptIds),
    output_ids: Array.from(sample.outputIds),
    logprobs: sample.logprobs === null
      ? null
      : Array.from(sample.logprobs, value => Number.isFinite(value) ? value : null),
    raw_logprobs: sample.raw,
    finish_reason: sample.finish,
    ...requestOf(sample),
    weight_versions: sample.spans.map(span => ({ ...span })),
    weights: {
      digest,
      state: sample.epoch === null ? 'mixed' : sample.epoch === epoch ? 'current' : 'gone'
    },
    lora: sample.lora ?? null,
    cached_tokens: sample.cachedTokens,
    retractions: sample.retractions
  })
}

/** The same with its seal. */
export function sealed (receipt: Omit<Receipt, 'seal'>): Receipt {
  return { ...receipt, seal: sealOf(receipt) }
}

/** Hashes JSON with sorted keys, so that a tool may write the fields in another order. */
export function sealOf ({ seal: _, ...receipt }: Partial<Receipt>): string {
  return createHash('sha256').update(JSON.stringify(ordered(receipt))).digest('hex')
}

function ordered (value: unknown): unknown {
  if (Array.isArray(value)) return value.map(ordered)
  if (typeof value !== 'object' || value === null) return value
  return Object.fromEntries(
    Object.entries(value).sort(([a], [b]) => a < b ? -1 : 1).map(([key, inner]) => [key, ordered(inner)])
  )
}

/** The sample's request in the fields of /generate. */
function requestOf ({ sampling, text, grammar }: KeptSample): Pick<Receipt, 'sampling_params' | 'unrepeatable'> {
  const { patterns } = text
  const unrepeatable: string[] = []
  if (sampling.allowedTokenIds !== undefined) unrepeatable.push('allowed_token_ids')
  if (sampling.badWords !== undefined) unrepeatable.push('bad_words')
  if (text.visible !== undefined && text.visible.size > 0) unrepeatable.push('special tokens that stay in the text')
  const constraint = grammar === null ? {} : grammarFields(grammar)
  if (constraint === null) unrepeatable.push(`a grammar (${grammar!.kind})`)
  return {
    sampling_params: {
      max_new_tokens: sampling.maxNewTokens,
      min_new_tokens: sampling.minNewTokens,
      temperature: sampling.temperature,
      top_p: sampling.topP,
      top_k: sampling.topK === 0 ? -1 : sampling.topK,
      min_p: sampling.minP,
      frequency_penalty: sampling.frequencyPenalty,
      presence_penalty: sampling.presencePenalty,
      repetition_penalty: sampling.repetitionPenalty,
      sampling_seed: String(sampling.seed),
      stop: [...text.stop],
      ...patterns === undefined ? {} : { stop_regex: patterns.sources },
      stop_token_ids: [...sampling.stopTokenIds],
      ignore_eos: sampling.ignoreEos,
      logit_bias: Object.fromEntries(sampling.logitBias),
      no_stop_trim: text.noStopTrim,
      skip_special_tokens: text.skipSpecialTokens,
      spaces_between_special_tokens: text.spacesBetweenSpecialTokens,
      ...constraint
    },
    unrepeatable
  }
}

/** Null if /generate has no field for it. */
function grammarFields (grammar: Grammar): Record<string, string> | null {
  if (grammar.after !== undefined || grammar.opening !== undefined) return null
  switch (grammar.kind) {
    case 'json_schema':
      return grammar.compact === true ? null : { json_schema: grammar.schema }
    case 'regex':
      return { regex: grammar.pattern }
    case 'ebnf':
      return { ebnf: grammar.grammar }
    case 'structural_tag':
      return { structural_tag: grammar.tag }
    default:
      return null
  }
}
