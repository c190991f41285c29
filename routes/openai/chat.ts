import { Type } from 'typebox'
import type { FastifyReply } from 'fastify'
import { chatLogprobs, ChatLogprobs } from '../../src/http/openai/chat-logprobs.ts'
import { stampsOf } from '../../src/http/generation/bound-version.ts'
import { ChatBody, planChat } from '../../src/http/openai/chat-plan.ts'
import type { ChatPlan as Plan } from '../../src/http/openai/chat-plan.ts'
import { ChatMessage, finishWithCalls, messageOf, ReplyParser } from '../../src/http/openai/chat-reply.ts'
import type { Delta } from '../../src/http/openai/chat-reply.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { refusalBody, refusalOf } from '../../src/http/error-reply.ts'
import { sendEvents } from '../../src/http/event-stream.ts'
import { abortOnHangup } from '../../src/http/generation/generation.ts'
import { LazyList, sendJson } from '../../src/http/json-parts.ts'
import { finishOf, openAiChoice, openAiReply, Usage, usageOf, versionOf } from '../../src/http/openai/openai-output.ts'
import { promptLogprobs, PromptLogprobs } from '../../src/http/openai/prompt-logprobs.ts'
import { sglext } from '../../src/http/generation/routed-experts.ts'
import { sglangOutput } from '../../src/http/sglang/sglang-output.ts'
import type { Sample } from '../../src/http/generation/sample.ts'
import { nullable, OpenAiRefusal, refusals, streamable } from '../../src/http/schemas.ts'

const Choice = Type.Object({
  ...openAiChoice,
  message: ChatMessage,
  logprobs: nullable(ChatLogprobs),
  meta_info: Type.Optional(
    Type.Object({}, { additionalProperties: true, description: 'The `meta_info` of /generate, if requested.' })
  )
})

export const ChatCompletion = Type.Object({
  ...openAiReply,
  object: Type.Literal('chat.completion'),
  choices: Type.Array(Choice),
  usage: Usage,
  prompt_token_ids: Type.Optional(Type.Array(Type.Integer())),
  prompt_text: Type.Optional(Type.String()),
  prompt_logprobs: PromptLogprobs
}, { title: 'ChatCompletion' })

/** OpenAI's chat completions, with the model's own chat template. */
const chat: Routes<GenerationContext> = async (app, { context }) => {
  app.post('/v1/chat/completions', {
    config: { auth: 'normal', errors: 'openai' },
    schema: {
      operationId: 'createChatCompletion',
      summary: 'Answer a conversation',
      tags: ['openai'],
      body: ChatBody,
      response: {
        200: streamable(ChatCompletion, 'n choices. With `stream`, events of `chat.completion.chunk`.'),
        ...refusals(OpenAiRefusal)
      }
    }
  }, async (request, reply) => await answerChat(request.body, context, reply))
}

/** Generates the reply of a chat request. */
export async function answerChat (body: ChatBody, context: GenerationContext, reply: FastifyReply) {
  const plan = await planChat(body, context)
  abortOnHangup(reply, plan.generation)
  if (body.stream === true) return await stream(plan, context, reply)
  await plan.generation.run()
  const { samples } = plan.generation
  return await sendJson(reply, {
    ...head(plan, 'chat.completion' as const),
    choices: new LazyList(samples.length, index => {
      const sample = samples[index]!
      const message = messageOf(sample.text, plan.reply)
      return {
        index,
        message: { ...message, content: plan.echo + message.content },
        logprobs: logprobsOf(plan, context, sample, 0),
        ...finishWithCalls(finishOf(sample.finish), message.tool_calls?.length ?? 0, plan.reply),
        ...samples.length > 1 ? sglext([sample], plan.experts) : {},
        ...tokenIds(plan, sample, 0),
        ...metaInfo(plan, context, sample)
      }
    }),
    usage: usageOf(samples, samples.length),
    metadata: versionOf(samples),
    ...stampsOf(samples),
    ...sglext(samples, plan.experts),
    ...promptIdsOf(plan),
    ...plan.best.prompt === null
      ? {}
      : { prompt_logprobs: promptLogprobs(samples[0]!, plan.best.prompt, context.tokenizer) }
  })
}

function head<T extends string> ({ id, created, model }: Plan, object: T) {
  return { id, object, created, model }
}

function logprobsOf ({ body, best }: Plan, { tokenizer }: GenerationContext, sample: Sample, from: number) {
  return best.output === null
    ? null
    : chatLogprobs(sample, from, { tokenizer, asIds: body.return_tokens_as_token_ids ?? false, best: best.output })
}

function tokenIds ({ body }: Plan, sample: Sample, from: number): { token_ids?: number[] } {
  return body.return_token_ids === true ? { token_ids: sample.tokens.slice(from) } : {}
}

function promptIdsOf ({ body, promptIds, promptText }: Plan): { prompt_token_ids?: number[], prompt_text?: string } {
  return {
    ...body.return_token_ids === true || body.return_prompt_token_ids === true
      ? { prompt_token_ids: Array.from(promptIds) }
      : {},
    ...body.return_prompt_text === true ? { prompt_text: promptText } : {}
  }
}

/** SGLang's `return_meta_info`: the numbers of /generate beside the parsed message. */
function metaInfo ({ body, best, experts }: Plan, { tokenizer, engine }: GenerationContext, sample: Sample) {
  if (body.return_meta_info !== true) return {}
  const { meta_info: info } = sglangOutput(sample, {
    tokenizer,
    logprobs: best.output !== null,
    top: (best.output ?? 0) > 0,
    ids: false,
    positions: null,
    texts: true,
    promptIds: false,
    experts,
    masks: { lists: body.return_sampling_mask === true, packed: false },
    dpRank: engine.info.dataParallel?.rank ?? null
  })
  return { meta_info: info as object }
}

/** The choices of a stream's chunks for one sample. */
function choiceStream (plan: Plan, context: GenerationContext, index: number) {
  const sample = plan.generation.samples[index]!
  const parser = new ReplyParser(plan.reply)
  const sent = { text: 0, tokens: 0, end: false }
  const waiting: object[] = []
  const add = (deltas: Delta[]): void => {
    for (const delta of deltas) waiting.push({ index, delta, logprobs: null, finish_reason: null })
  }
  const read = (): void => {
    const deltas = parser.push(sample.text.slice(sent.text))
    const logprobs = sample.tokens.length > sent.tokens ? logprobsOf(plan, context, sample, sent.tokens) : null
    const ids = tokenIds(plan, sample, sent.tokens)
    sent.text = sample.text.length
    sent.tokens = sample.tokens.length
    // Tokens whose text is held back have a chunk if they have more than text.
    if (deltas.length === 0 && (logprobs !== null || ids.token_ids !== undefined)) deltas.push({ content: '' })
    add(deltas)
    if (deltas.length > 0) Object.assign(waiting[waiting.length - deltas.length]!, { logprobs, ...ids })
  }
  const end = (): void => {
    sent.end = true
    add(parser.finish())
    const finish = finishWithCalls(finishOf(sample.finish), parser.calls, plan.reply)
    const extension = plan.generation.samples.length > 1 ? sglext([sample], plan.experts) : {}
    waiting.push({ index, delta: {}, logprobs: null, ...finish, ...extension })
  }
  return {
    begun: false,
    next (): object | undefined {
      if (!this.begun) {
        this.begun = true
        return { index, delta: { role: 'assistant', content: plan.echo }, logprobs: null, finish_reason: null }
      }
      if (waiting.length === 0 && (sample.text.length > sent.text || sample.tokens.length > sent.tokens)) read()
      if (waiting.length === 0 && sample.finish !== null && !sent.end) end()
      return waiting.shift()
    }
  }
}

async function stream (plan: Plan, context: GenerationContext, reply: FastifyReply): Promise<FastifyReply> {
  const { generation, body } = plan
  const { samples } = generation
  const changed = new Set<number>()
  const choices = samples.map((_, index) => choiceStream(plan, context, index))
  const wantUsage = body.stream_options?.include_usage === true
  let usageDue = false
  let expertsDue = false
  const chunk = (choices: object[]): object => ({
    ...head(plan, 'chat.completion.chunk'),
    choices,
    ...wantUsage ? { usage: null } : {}
  })

  const nextOf = (index: number): object | undefined => {
    const begun = choices[index]!.begun
    const choice = choices[index]!.next()
    if (choice !== undefined) return { ...chunk([choice]), ...begun ? {} : promptIdsOf(plan) }
    changed.delete(index)
    return undefined
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
        ...head(plan, 'chat.completion.chunk'),
        choices: [],
        usage: usageOf(samples, samples.length),
        metadata: versionOf(samples),
        ...stampsOf(samples)
      }
    },
    failure: error => refusalBody('openai', refusalOf(error))
  })
}

export default chat
