import { Type } from 'typebox'
import type { FastifyReply } from 'fastify'
import { CountBody, MessagesBody } from '../../src/dialects/anthropic/body.ts'
import { KEY_HEADER } from '../../src/dialects/anthropic/dialect.ts'
import { anthropicErrors } from '../../src/dialects/anthropic/error-form.ts'
import {
  anthropicUsage,
  BlockEvents,
  blocksOf,
  headOf,
  MessageReply,
  stopOf
} from '../../src/dialects/anthropic/reply.ts'
import { messagesToChat, promptToChat } from '../../src/dialects/anthropic/to-chat.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { refusalOf } from '../../src/http/error-reply.ts'
import { sendEvents } from '../../src/http/event-stream.ts'
import { abortOnHangup } from '../../src/http/generation/generation.ts'
import { planChat } from '../../src/http/openai/chat-plan.ts'
import type { ChatPlan } from '../../src/http/openai/chat-plan.ts'
import { readPrompt } from '../../src/http/openai/chat-prompt.ts'
import { messageOf, ReplyParser } from '../../src/http/openai/chat-reply.ts'
import { readTools } from '../../src/http/openai/chat-tools.ts'
import { versionOf } from '../../src/http/openai/openai-output.ts'
import { refusals, streamable } from '../../src/http/schemas.ts'

const MessagesRefusal = Type.Object({
  type: Type.Literal('error'),
  error: Type.Object({
    type: Type.String(),
    message: Type.String(),
    code: Type.String({ description: 'A stable code, such as INVALID_REQUEST.' }),
    param: Type.Union([Type.String(), Type.Null()])
  })
}, { title: 'MessagesRefusal', description: 'Refused.' })

const Counted = Type.Object({ input_tokens: Type.Integer() }, { title: 'CountedTokens', description: 'The prompt.' })

/** Anthropic's Messages: the same prompts, generation and parsers as chat. */
const messages: Routes<GenerationContext> = async (app, { context }) => {
  const config = { auth: 'normal', errors: anthropicErrors, keyHeader: KEY_HEADER } as const

  app.post('/v1/messages', {
    config,
    schema: {
      operationId: 'createMessage',
      summary: 'Answer a conversation (Anthropic)',
      tags: ['generation'],
      body: MessagesBody,
      response: {
        200: streamable(
          MessageReply,
          "The reply. With `stream`, Anthropic's events up to message_stop."
        ),
        ...refusals(MessagesRefusal)
      }
    }
  }, async (request, reply) => {
    const { stream: isStream } = request.body
    const plan = await planChat(messagesToChat(request.body), context)
    abortOnHangup(reply, plan.generation)
    if (isStream === true) return await stream(plan, context, reply)
    await plan.generation.run()
    const sample = plan.generation.samples[0]!
    const message = messageOf(sample.text, plan.reply)
    return {
      ...headOf(plan.model),
      content: blocksOf(message) as { type: string }[],
      ...stopOf(sample, message.tool_calls?.length ?? 0),
      usage: anthropicUsage(sample),
      metadata: versionOf([sample])
    }
  })

  app.post('/v1/messages/count_tokens', {
    config,
    schema: {
      operationId: 'countMessageTokens',
      summary: 'Number of tokens of a conversation (Anthropic)',
      tags: ['text'],
      body: CountBody,
      response: { 200: Counted, ...refusals(MessagesRefusal) }
    }
  }, async ({ body }) => {
    const chat = promptToChat(body)
    readTools(chat, context.parsers)
    return { input_tokens: (await readPrompt(chat, context)).ids.length }
  })
}

async function stream (plan: ChatPlan, context: GenerationContext, reply: FastifyReply): Promise<FastifyReply> {
  const sample = plan.generation.samples[0]!
  const parser = new ReplyParser(plan.reply)
  const blocks = new BlockEvents()
  const waiting: object[] = []
  let state: 'new' | 'open' | 'ended' = 'new'
  let read = 0

  const begin = (): void => {
    state = 'open'
    const message = {
      ...headOf(plan.model),
      content: [],
      stop_reason: null,
      stop_sequence: null,
      usage: { ...anthropicUsage(sample), output_tokens: 0 }
    }
    waiting.push({ type: 'message_start', message })
  }
  const end = (): void => {
    state = 'ended'
    waiting.push(
      ...parser.finish().flatMap(delta => blocks.push(delta)),
      ...blocks.finish(),
      { type: 'message_delta', delta: stopOf(sample, parser.calls), usage: anthropicUsage(sample) },
      { type: 'message_stop' }
    )
  }

  let started = false
  return await sendEvents(reply, {
    named: true,
    run: async notify =>
      await plan.generation.run(() => {
        started = true
        notify()
      }),
    next: () => {
      // The first event of the engine has the number of cached tokens.
      if (state === 'new' && started) begin()
      if (waiting.length === 0 && sample.text.length > read) {
        waiting.push(...parser.push(sample.text.slice(read)).flatMap(delta => blocks.push(delta)))
        read = sample.text.length
      }
      if (waiting.length === 0 && sample.finish !== null && state === 'open') end()
      return waiting.shift()
    },
    failure: error => anthropicErrors(refusalOf(error))
  })
}

export default messages
