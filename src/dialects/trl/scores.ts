import { Type } from 'typebox'
import type { Static } from 'typebox'
import { RefitError } from '../../errors.ts'
import type { InputLogprobs, Scored } from '../../contract/rollout-engine.ts'
import type { GenerationContext } from '../../http/context.ts'
import { newRid } from '../../http/generation/new-rid.ts'
import type { SampleRequest } from '../../http/generation/generation.ts'
import { MAX_BATCH, MAX_TOP_LOGPROBS } from '../../http/limits.ts'
import { finite } from '../../http/openai/openai-output.ts'
import { checkBatch, fitContext, idsOf } from '../../http/generation/prompts.ts'
import { LazyList, written } from '../../http/json-parts.ts'
import { invalid } from '../../http/refuse.ts'
import { hasTime, nextTurn } from '../../http/turns.ts'
import type { Sample } from '../../http/generation/sample.ts'
import { nullable, TokenIds } from '../../http/schemas.ts'
import { PLAIN_SAMPLING } from '../../http/generation/plain-sampling.ts'

/** A teacher model scores sequences of a student. */
export const TrlScoresBody = Type.Object({
  sequences: Type.Array(TokenIds, {
    minItems: 1,
    maxItems: MAX_BATCH,
    description: 'Token ids: each a prompt and its completion.'
  }),
  prompt_lengths: Type.Array(Type.Integer({ minimum: 0 }), {
    description: 'Position of each sequence from which on it is scored.'
  }),
  top_logprobs: nullable(
    Type.Integer({ minimum: 1, maximum: MAX_TOP_LOGPROBS }),
    'Best tokens of each position (default 100).'
  ),
  temperature: nullable(Type.Number(), "Only 1: scores are of the model's own distribution."),
  response_format: nullable(
    Type.Union([Type.Literal('json'), Type.Literal('binary')]),
    'binary: base64 of float32 and int32 arrays, little-endian (default json).'
  )
}, { title: 'TrlScoresRequest' })

const Base64 = Type.Optional(Type.String())

export const TrlScoresReply = Type.Object({
  logprobs: nullable(
    Type.Array(Type.Array(Type.Array(Type.Number()))),
    'Per sequence and position, best first. The token of the sequence comes last if it is not among the best.'
  ),
  logprob_token_ids: nullable(Type.Array(Type.Array(TokenIds))),
  logprobs_b64: Base64,
  token_ids_b64: Base64,
  actual_logprobs_b64: Base64,
  actual_token_ids_b64: Base64,
  shape: nullable(
    Type.Array(Type.Integer()),
    'Shape of the first two arrays: sequences, most positions, top_logprobs. The last two have one entry per position.'
  ),
  completion_lengths: nullable(Type.Array(Type.Integer()))
}, { title: 'TrlScores', description: 'Lists, or arrays in base64.' })

const NO_TEXT = { stop: [], noStopTrim: false, skipSpecialTokens: true, spacesBetweenSpecialTokens: true }
const DEFAULT_TOP = 100
/** Most scores of one binary reply (256 MiB), with rows padded to the longest. */
const MOST_CELLS = 1 << 26

export interface TrlScoresPlan {
  samples: SampleRequest[]
  lengths: number[]
  top: number
  binary: boolean
}

export function planTrlScores (
  body: Static<typeof TrlScoresBody>,
  { engine: { info }, maxBatch }: GenerationContext
): TrlScoresPlan {
  const { sequences, prompt_lengths: lengths } = body
  if (lengths.length !== sequences.length) {
    throw invalid('prompt_lengths', `expected one for each of the ${sequences.length} sequences, got ${lengths.length}`)
  }
  if ((body.temperature ?? 1) !== 1) {
    throw new RefitError(
      'UNSUPPORTED',
      `temperature: given sequences are scored by the model's own distribution, temperature 1, got ${body.temperature}`,
      { param: 'temperature' }
    )
  }
  checkBatch(sequences.length, 1, info, maxBatch, 'sequences')
  const top = Math.min(body.top_logprobs ?? DEFAULT_TOP, info.vocabSize)
  const samples = sequences.map((ids, i): SampleRequest => {
    const promptIds = idsOf(ids, info, `sequences[${i}]`)
    const length = lengths[i]!
    if (length > ids.length) {
      throw invalid(`prompt_lengths[${i}]`, `expected at most the ${ids.length} tokens of its sequence, got ${length}`)
    }
    fitContext(ids.length, 0, info, `sequences[${i}]`)
    return {
      rid: newRid(),
      names: [],
      promptIds,
      sampling: { ...PLAIN_SAMPLING, maxNewTokens: 0 },
      logprobs: { startLen: length, top, ids: [], raw: true },
      text: NO_TEXT,
      cacheSalt: undefined
    }
  })
  const cells = samples.length * Math.max(...sequences.map((ids, i) => ids.length - lengths[i]!)) *
    (body.top_logprobs ?? DEFAULT_TOP)
  if (body.response_format === 'binary' && cells > MOST_CELLS) {
    throw invalid(
      'top_logprobs',
      'sequences times most scored positions times top_logprobs: ' +
        `expected at most ${MOST_CELLS} in one binary reply, got ${cells}`
    )
  }
  return { samples, lengths, top: body.top_logprobs ?? DEFAULT_TOP, binary: body.response_format === 'binary' }
}

export async function trlScores (
  { lengths, top, binary }: TrlScoresPlan,
  samples: readonly Sample[]
): Promise<Static<typeof TrlScoresReply>> {
  const inputs = samples.map(({ input }) => {
    if (input !== null) return input
    throw new RefitError(
      'CONFLICT',
      'the request was aborted (/abort_request, or a pause or an update that ends requests) before all of its ' +
        'sequences were scored: send it again'
    )
  })
  if (binary) return await packed(inputs, samples.map(({ promptIds }, i) => promptIds.length - lengths[i]!), top)
  const column = (read: (scored: Scored) => number): LazyList =>
    new LazyList(inputs.length, s => {
      const { logprobs, top: best } = inputs[s]!
      return new LazyList(logprobs.length, i => {
        const [logprob, id] = logprobs.at(i)!
        return logprob === null ? [] : sortedScores([logprob, id], best.at(i) ?? []).map(read)
      })
    })
  return written({ logprobs: column(([logprob]) => logprob), logprob_token_ids: column(([, id]) => id) })
}

/** A token's own score and the best ones, each token once, best first. */
export function sortedScores (own: Scored, best: readonly Scored[]): Scored[] {
  const scores = best.some(([, id]) => id === own[1]) ? [...best] : [...best, own]
  return scores.map(([logprob, id]): Scored => [finite(logprob), id]).sort(([a], [b]) => b - a)
}

/** Pads the rows of all sequences to the longest, with -Infinity and token 0. */
async function packed (
  inputs: readonly InputLogprobs[],
  lengths: number[],
  top: number
): Promise<Static<typeof TrlScoresReply>> {
  const most = Math.max(...lengths)
  const positions = inputs.length * most
  const logprobs = new Float32Array(positions * top).fill(-Infinity)
  const ids = new Int32Array(positions * top)
  const own = new Float32Array(positions).fill(-Infinity)
  const ownIds = new Int32Array(positions)
  for (const [s, input] of inputs.entries()) {
    for (let i = 0; i < input.logprobs.length; i++) {
      if (!hasTime()) await nextTurn()
      const [logprob, id] = input.logprobs.at(i)!
      if (logprob === null) continue
      const at = s * most + i
      own[at] = logprob
      ownIds[at] = id
      for (const [k, [score, token]] of (input.top.at(i) ?? []).entries()) {
        logprobs[at * top + k] = score
        ids[at * top + k] = token
      }
    }
  }
  const base64 = (array: Float32Array | Int32Array): string => Buffer.from(array.buffer).toString('base64')
  return {
    logprobs_b64: base64(logprobs),
    token_ids_b64: base64(ids),
    actual_logprobs_b64: base64(own),
    actual_token_ids_b64: base64(ownIds),
    shape: [inputs.length, most, top],
    completion_lengths: lengths
  }
}
