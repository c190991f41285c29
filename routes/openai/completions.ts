import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { FastifyReply } from 'fastify'
import { RefitError } from '../../src/errors.ts'
import { chooseModel } from '../../src/http/adapters.ts'
import { completionLogprobs, CompletionLogprobs } from '../../src/http/openai/completion-logprobs.ts'
import { stampsOf } from '../../src/http/generation/bound-version.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { refusalBody, refusalOf } from '../../src/http/error-reply.ts'
import { sendEvents } from '../../src/http/event-stream.ts'
import { newRid } from '../../src/http/generation/new-rid.ts'
import { abortOnHangup, Generation } from '../../src/http/generation/generation.ts'
import { MAX_TOP_LOGPROBS } from '../../src/http/limits.ts'
import { LazyList, sendJson } from '../../src/http/json-parts.ts'
import { openAiFields, openAiRid, openAiSamples, openAiSampling } from '../../src/http/openai/openai-body.ts'
import { finishOf, openAiChoice, openAiReply, Usage, usageOf, versionOf } from '../../src/http/openai/openai-output.ts'
import {
  bestOf,
  promptLogprobs,
  PromptLogprobs,
  promptLogprobsField,
  scoring
} from '../../src/http/openai/prompt-logprobs.ts'
import { checkBatch, encodeText, encodeTexts, idsOf } from '../../src/http/generation/prompts.ts'
import { invalid, refuseFields } from '../../src/http/refuse.ts'
import { sglext, wantedExperts } from '../../src/http/generation/routed-experts.ts'
import type { WantedExperts } from '../../src/http/generation/routed-experts.ts'
import type { Sample } from '../../src/http/generation/sample.ts'
import { nullable, OpenAiRefusal, refusals, refused, streamable, TokenIds } from '../../src/http/schemas.ts'
import { truncate } from '../../src/http/generation/truncation.ts'

const DEFAULT_MAX_TOKENS = 16

const Body = Type.Object({
  ...openAiFields,
  prompt: Type.Union([Type.String(), Type.Array(Type.String()), TokenIds, Type.Array(TokenIds)], {
    description: 'Text, token ids, or a batch of either.'
  }),
  max_tokens: nullable(Type.Integer({ minimum: 0 }), 'Default 16; 0 scores the prompt only.'),
  echo: nullable(
    Type.Boolean(),
    'Return the prompt, too, with its logprobs if requested. Without a tokenizer its text is empty, as all texts are.'
  ),
  logprobs: nullable(
    Type.Union([Type.Integer({ minimum: 0, maximum: MAX_TOP_LOGPROBS }), Type.Boolean()]),
    "Best alternatives per token; 0 for only the token's own logprob. true is 1, and false is 0."
  ),
  prompt_logprobs: promptLogprobsField,
  best_of: nullable(Type.Integer(), 'Only the value of n.'),
  add_special_tokens: nullable(Type.Boolean(), 'Begin texts with the special tokens of the tokenizer (default true).'),
  suffix: refused('suffixes'),
  prompt_embeds: refused('embeddings as input')
}, { title: 'CompletionRequest' })

type Body = Static<typeof Body>

const Choice = Type.Object({
  ...openAiChoice,
  text: Type.String(),
  logprobs: nullable(CompletionLogprobs),
  prompt_logprobs: PromptLogprobs
})
const Completion = Type.Object({
  ...openAiReply,
  object: Type.Literal('text_completion'),
  choices: Type.Array(Choice),
  usage: Usage
}, {
  title: 'Completion'
})

interface Plan {
  body: Body
  id: string
  /** For the reply: the name of the adapter, or of the model. */
  model: string
  created: number
  generation: Generation
  n: number
  /** The prompt texts to echo, by sample. */
  echoes: string[] | null
  /** Number of best tokens for output and prompt; null for no scores. */
  best: { output: number | null, prompt: number | null }
  /** Null: not requested. */
  experts: WantedExperts | null
}

/** OpenAI's completions. */
const completions: Routes<GenerationContext> = async (app, { context }) => {
  app.post('/v1/completions', {
    config: { auth: 'normal', errors: 'openai' },
    schema: {
      operationId: 'createCompletion',
      summary: 'Complete a prompt',
      tags: ['openai'],
      body: Body,
      response: {
        200: streamable(
          Completion,
          'Choices in the order of prompts, n for each prompt. With `stream`, events with the new tokens.'
        ),
        ...refusals(OpenAiRefusal)
      }
    }
  }, async (request, reply) => {
    const plan = await read(request.body, context)
    abortOnHangup(reply, plan.generation)
    if (plan.body.stream === true) return await stream(plan, context, reply)
    await plan.generation.run()
    const { samples } = plan.generation
    return await sendJson(reply, {
      ...head(plan),
      choices: new LazyList(samples.length, i => choice(plan, context, samples[i]!, i, 0, 0)),
      usage: usageOf(samples, plan.n),
      metadata: versionOf(samples),
      ...stampsOf(samples),
      ...sglext(samples, plan.experts)
    })
  })
}

async function read (body: Body, context: GenerationContext): Promise<Plan> {
  refuseFields(Body, body)
  if (body.best_of != null && body.best_of !== (body.n ?? 1)) {
    throw new RefitError('UNSUPPORTED', 'best_of: only the value of n is supported', { param: 'best_of' })
  }
  const { info } = context.engine
  const n = body.n ?? 1
  const { model, adapter } = chooseModel(context, body)
  // Before anything is read for each prompt, or each sample.
  checkBatch(countPrompts(body), n, info, context.maxBatch, n > 1 ? 'n' : 'prompt')
  const sampling = openAiSampling(body, body.max_tokens ?? undefined, context, DEFAULT_MAX_TOKENS)
  const prompts = (await readPrompts(body, context)).map(ids => truncate(ids, body, info))
  if (body.stream === true && body.prompt_logprobs != null) {
    throw invalid('prompt_logprobs', 'is not possible in a stream')
  }
  const wanted = body.logprobs == null ? null : Number(body.logprobs)
  const best = { output: bestOf(wanted, info.vocabSize), prompt: bestOf(body.prompt_logprobs, info.vocabSize) }
  const logprobs = scoring(best.output, best.prompt ?? (body.echo === true ? best.output : null))
  const experts = wantedExperts(body, prompts, info)
  const plans = prompts.flatMap((promptIds, i) =>
    openAiSamples({
      body,
      promptIds,
      sampling,
      logprobs,
      experts,
      info,
      rid: openAiRid(body, i, prompts.length),
      param: 'prompt',
      fallback: DEFAULT_MAX_TOKENS,
      adapter
    })
  )
  const { tokenizer } = context
  const { skipSpecialTokens } = sampling.text
  return {
    body: { ...body, prompt: [] },
    id: `cmpl-${newRid()}`,
    model,
    created: Math.floor(Date.now() / 1000),
    generation: new Generation(context, plans),
    n: sampling.n,
    best,
    experts,
    echoes: body.echo === true
      ? plans.map(({ promptIds }) => tokenizer?.decode(promptIds, { skipSpecialTokens }) ?? '')
      : null
  }
}

function countPrompts ({ prompt }: Body): number {
  if (prompt.length === 0 && typeof prompt !== 'string') throw invalid('prompt', 'cannot be empty')
  return typeof prompt === 'string' || typeof prompt[0] === 'number' ? 1 : prompt.length
}

async function readPrompts (body: Body, { engine, tokenizer }: GenerationContext): Promise<Int32Array[]> {
  const { prompt } = body
  const { info } = engine
  const options = { addSpecialTokens: body.add_special_tokens ?? true, isCut: body.truncate_prompt_tokens != null }
  const nameOf = (i: number): string => `prompt[${i}]`
  if (typeof prompt === 'string') return [await encodeText(tokenizer, prompt, info, 'prompt', options)]
  if (typeof prompt[0] === 'string') return await encodeTexts(tokenizer, prompt as string[], info, nameOf, options)
  if (typeof prompt[0] === 'number') return [idsOf(prompt as number[], info, 'prompt')]
  return (prompt as number[][]).map((ids, i) => idsOf(ids, info, nameOf(i)))
}

function head ({ id, created, model }: Plan) {
  return { id, object: 'text_completion' as const, created, model }
}

/** The part of a sample after the `text` characters and `tokens` tokens that were sent already. */
function choice (
  { body, echoes, best, experts, generation }: Plan,
  { tokenizer }: GenerationContext,
  sample: Sample,
  index: number,
  text: number,
  tokens: number
) {
  const first = text === 0 && tokens === 0
  const echo = echoes?.[index] ?? ''
  const texts = { tokenizer, asIds: body.return_tokens_as_token_ids ?? false, best: best.output ?? 0 }
  const offset = first ? 0 : echo.length + text
  return {
    index,
    text: (first ? echo : '') + sample.text.slice(text),
    logprobs: best.output === null
      ? null
      : completionLogprobs(sample, tokens, sample.tokens.length, first && echoes !== null, offset, texts),
    ...finishOf(sample.finish),
    ...generation.samples.length > 1 ? sglext([sample], experts) : {},
    ...best.prompt === null ? {} : { prompt_logprobs: promptLogprobs(sample, best.prompt, tokenizer) },
    ...body.return_token_ids === true
      ? { token_ids: sample.tokens.slice(tokens), ...first ? { prompt_token_ids: Array.from(sample.promptIds) } : {} }
      : {}
  }
}

async function stream (plan: Plan, context: GenerationContext, reply: FastifyReply): Promise<FastifyReply> {
  const { generation, body, n } = plan
  const { samples } = generation
  const changed = new Set<number>()
  const sent = samples.map(() => ({ text: 0, tokens: 0 }))
  const wantUsage = body.stream_options?.include_usage === true
  let usageDue = false
  let expertsDue = false
  return await sendEvents(reply, {
    run: async notify => {
      await generation.run(index => {
        changed.add(index)
        notify()
      })
      usageDue = wantUsage
      expertsDue = plan.experts !== null
    },
    next: () => {
      for (const index of changed) {
        changed.delete(index)
        const sample = samples[index]!
        const last = sent[index]!
        if (sample.finish === null && sample.tokens.length === last.tokens && sample.text.length === last.text) continue
        const news = choice(plan, context, sample, index, last.text, last.tokens)
        sent[index] = { text: sample.text.length, tokens: sample.tokens.length }
        return { ...head(plan), choices: [news], ...wantUsage ? { usage: null } : {} }
      }
      if (expertsDue) {
        expertsDue = false
        const extension = sglext(samples, plan.experts)
        if (extension.sglext !== undefined) {
          return { ...head(plan), choices: [], ...extension, ...wantUsage ? { usage: null } : {} }
        }
      }
      if (!usageDue) return undefined
      usageDue = false
      return {
        ...head(plan),
        choices: [],
        usage: usageOf(samples, n),
        metadata: versionOf(samples),
        ...stampsOf(samples)
      }
    },
    failure: error => refusalBody('openai', refusalOf(error))
  })
}

export default completions
