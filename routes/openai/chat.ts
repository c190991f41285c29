import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { FastifyReply } from 'fastify'
import { chatLogprobs, ChatLogprobs } from '../../src/http/openai/chat-logprobs.ts'
import { chatFields, chatPrompt, Message } from '../../src/http/openai/chat-prompt.ts'
import type { RouteContext, Routes } from '../../src/http/context.ts'
import { refusalBody, refusalOf } from '../../src/http/error-reply.ts'
import { sendEvents } from '../../src/http/event-stream.ts'
import { newRid } from '../../src/http/sglang/generate-body.ts'
import { abortOnHangup, Generation } from '../../src/http/generation.ts'
import { MAX_TOP_LOGPROBS } from '../../src/http/limits.ts'
import { openAiFields, openAiRid, openAiSamples, openAiSampling } from '../../src/http/openai/openai-body.ts'
import { finishOf, openAiChoice, openAiReply, Usage, usageOf, versionOf } from '../../src/http/openai/openai-output.ts'
import {
  bestOf,
  promptLogprobs,
  PromptLogprobs,
  promptLogprobsField,
  scoring
} from '../../src/http/openai/prompt-logprobs.ts'
import { checkBatch } from '../../src/http/prompts.ts'
import { invalid, refuseFormat, refuseUnsupported } from '../../src/http/refuse.ts'
import { sglext, wantedExperts } from '../../src/http/sglang/routed-experts.ts'
import type { WantedExperts } from '../../src/http/sglang/routed-experts.ts'
import type { Sample } from '../../src/http/sample.ts'
import { nullable, OpenAiRefusal, refusals, refused, streamable, unused } from '../../src/http/schemas.ts'

const Body = Type.Object({
  ...openAiFields,
  ...chatFields,
  messages: Type.Array(Message, { minItems: 1 }),
  max_tokens: nullable(Type.Integer({ minimum: 0 }), 'Default: the rest of the context.'),
  max_completion_tokens: nullable(Type.Integer({ minimum: 0 }), 'The new name of max_tokens; it wins.'),
  logprobs: nullable(Type.Boolean()),
  top_logprobs: nullable(
    Type.Integer({ minimum: 0, maximum: MAX_TOP_LOGPROBS }),
    'Best alternatives per token; needs `logprobs`.'
  ),
  prompt_logprobs: promptLogprobsField,
  return_prompt_token_ids: nullable(Type.Boolean()),
  audio: refused('audio'),
  response_format: unused('Only {"type": "text"}.'),
  parallel_tool_calls: unused(),
  modalities: unused(),
  reasoning_effort: unused(),
  separate_reasoning: unused(),
  stream_reasoning: unused(),
  service_tier: unused()
}, { title: 'ChatCompletionRequest' })

type Body = Static<typeof Body>

const Choice = Type.Object({
  ...openAiChoice,
  message: Type.Object({ role: Type.Literal('assistant'), content: Type.String() }),
  logprobs: nullable(ChatLogprobs)
})

const ChatCompletion = Type.Object({
  ...openAiReply,
  object: Type.Literal('chat.completion'),
  choices: Type.Array(Choice),
  usage: Usage,
  prompt_token_ids: Type.Optional(Type.Array(Type.Integer())),
  prompt_logprobs: PromptLogprobs
}, { title: 'ChatCompletion' })

interface Plan {
  body: Body
  id: string
  created: number
  generation: Generation
  promptIds: Int32Array
  /** Number of best tokens for output and prompt; null for no scores. */
  best: { output: number | null, prompt: number | null }
  /** Null: not requested. */
  experts: WantedExperts | null
}

/** OpenAI's chat completions, with the model's own chat template. */
const chat: Routes = async (app, { context }) => {
  app.post('/v1/chat/completions', {
    config: { auth: 'normal', errors: 'openai' },
    schema: {
      operationId: 'createChatCompletion',
      summary: 'Answer a conversation',
      tags: ['openai'],
      body: Body,
      response: {
        200: streamable(ChatCompletion, 'n choices. With `stream`, events of `chat.completion.chunk`.'),
        ...refusals(OpenAiRefusal)
      }
    }
  }, async (request, reply) => {
    const plan = read(request.body, context)
    abortOnHangup(reply.raw, plan.generation)
    if (request.body.stream === true) return await stream(plan, context, reply)
    await plan.generation.run()
    const { samples } = plan.generation
    return {
      ...head(plan, context, 'chat.completion' as const),
      choices: samples.map((sample, index) => ({
        index,
        message: { role: 'assistant' as const, content: sample.text },
        logprobs: logprobsOf(plan, context, sample, 0),
        ...finishOf(sample.finish),
        ...samples.length > 1 ? sglext([sample], plan.experts) : {},
        ...tokenIds(plan, sample, 0)
      })),
      usage: usageOf(samples, samples.length),
      metadata: versionOf(samples),
      ...sglext(samples, plan.experts),
      ...promptIdsOf(plan),
      ...plan.best.prompt === null
        ? {}
        : { prompt_logprobs: promptLogprobs(samples[0]!, plan.best.prompt, context.tokenizer) }
    }
  })
}

function read (body: Body, context: RouteContext): Plan {
  refuseUnsupported(body, { audio: 'audio is' })
  refuseFormat(body.response_format)
  if ((body.top_logprobs ?? 0) > 0 && body.logprobs !== true) throw invalid('top_logprobs', 'needs "logprobs": true')
  if (body.stream === true && body.prompt_logprobs != null) {
    throw invalid('prompt_logprobs', 'is not possible in a stream')
  }
  const { info } = context.engine
  const promptIds = chatPrompt(body.messages, body, context)
  const sampling = openAiSampling(body, body.max_completion_tokens ?? body.max_tokens ?? null, context)
  checkBatch(1, sampling.n, info, context.maxBatch, 'n')
  const best = {
    output: body.logprobs === true ? bestOf(body.top_logprobs ?? 0, info.vocabSize) : null,
    prompt: bestOf(body.prompt_logprobs, info.vocabSize)
  }
  const experts = wantedExperts(body, [promptIds], info)
  const plans = openAiSamples({
    body,
    promptIds,
    sampling,
    logprobs: scoring(best.output, best.prompt),
    experts,
    info,
    rid: openAiRid(body, 0, 1),
    param: 'messages'
  })
  return {
    body,
    id: `chatcmpl-${newRid()}`,
    created: Math.floor(Date.now() / 1000),
    generation: new Generation(context, plans),
    promptIds,
    best,
    experts
  }
}

function head<T extends string> ({ id, created }: Plan, { engine }: RouteContext, object: T) {
  return { id, object, created, model: engine.info.servedModelName }
}

function logprobsOf ({ body, best }: Plan, { tokenizer }: RouteContext, sample: Sample, from: number) {
  return best.output === null
    ? null
    : chatLogprobs(sample, from, { tokenizer, asIds: body.return_tokens_as_token_ids ?? false, best: best.output })
}

function tokenIds ({ body }: Plan, sample: Sample, from: number): { token_ids?: number[] } {
  return body.return_token_ids === true ? { token_ids: sample.tokens.slice(from) } : {}
}

function promptIdsOf ({ body, promptIds }: Plan): { prompt_token_ids?: number[] } {
  return body.return_token_ids === true || body.return_prompt_token_ids === true
    ? { prompt_token_ids: Array.from(promptIds) }
    : {}
}

async function stream (plan: Plan, context: RouteContext, reply: FastifyReply): Promise<FastifyReply> {
  const { generation, body } = plan
  const { samples } = generation
  const changed = new Set<number>()
  const sent = samples.map(() => ({ role: false, text: 0, tokens: 0 }))
  const wantUsage = body.stream_options?.include_usage === true
  let usageDue = false
  let expertsDue = false
  const chunk = (choices: object[]): object => ({
    ...head(plan, context, 'chat.completion.chunk'),
    choices,
    ...wantUsage ? { usage: null } : {}
  })

  const nextOf = (index: number): object | undefined => {
    const sample = samples[index]!
    const last = sent[index]!
    if (!last.role) {
      last.role = true
      return {
        ...chunk([{ index, delta: { role: 'assistant', content: '' }, logprobs: null, finish_reason: null }]),
        ...promptIdsOf(plan)
      }
    }
    if (sample.text.length > last.text || sample.tokens.length > last.tokens) {
      const news = {
        index,
        delta: { content: sample.text.slice(last.text) },
        logprobs: logprobsOf(plan, context, sample, last.tokens),
        finish_reason: null,
        ...tokenIds(plan, sample, last.tokens)
      }
      last.text = sample.text.length
      last.tokens = sample.tokens.length
      return chunk([news])
    }
    changed.delete(index)
    if (sample.finish === null) return undefined
    const extension = samples.length > 1 ? sglext([sample], plan.experts) : {}
    return chunk([{ index, delta: {}, logprobs: null, ...finishOf(sample.finish), ...extension }])
  }

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
        const event = nextOf(index)
        if (event !== undefined) return event
      }
      if (expertsDue) {
        expertsDue = false
        const extension = sglext(samples, plan.experts)
        if (extension.sglext !== undefined) return { ...chunk([]), ...extension }
      }
      if (!usageDue) return undefined
      usageDue = false
      return {
        ...head(plan, context, 'chat.completion.chunk'),
        choices: [],
        usage: usageOf(samples, samples.length),
        metadata: versionOf(samples)
      }
    },
    failure: error => refusalBody('openai', refusalOf(error))
  })
}

export default chat
