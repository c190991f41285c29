import type { FastifyReply } from 'fastify'
import { ResponsesBody } from '../../src/dialects/openai/responses/body.ts'
import { ItemEvents, Response, responseHead, responseOf } from '../../src/dialects/openai/responses/reply.ts'
import { responsesToChat } from '../../src/dialects/openai/responses/to-chat.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { refusalOf } from '../../src/http/error-reply.ts'
import { sendEvents } from '../../src/http/event-stream.ts'
import { abortOnHangup } from '../../src/http/generation/generation.ts'
import { planChat } from '../../src/http/openai/chat-plan.ts'
import type { ChatPlan } from '../../src/http/openai/chat-plan.ts'
import { ReplyParser } from '../../src/http/openai/chat-reply.ts'
import { OpenAiRefusal, refusals, streamable } from '../../src/http/schemas.ts'

/** OpenAI's Responses without stored state: the same prompts, generation and parsers as chat. */
const responses: Routes<GenerationContext> = async (app, { context }) => {
  app.post('/v1/responses', {
    config: { auth: 'normal', errors: 'openai' },
    schema: {
      operationId: 'createResponse',
      summary: 'Answer a conversation (Responses)',
      tags: ['openai'],
      body: ResponsesBody,
      response: {
        200: streamable(Response, 'The reply. With `stream`, events up to response.completed.'),
        ...refusals(OpenAiRefusal)
      }
    }
  }, async (request, reply) => {
    const { body } = request
    const plan = await planChat(responsesToChat(body), context)
    abortOnHangup(reply, plan.generation)
    if (body.stream === true) return await stream(body, plan, context, reply)
    await plan.generation.run()
    const sample = plan.generation.samples[0]!
    const parser = new ReplyParser(plan.reply)
    const items = new ItemEvents()
    for (const delta of [...parser.push(sample.text), ...parser.finish()]) items.push(delta)
    items.finish()
    return responseOf(responseHead(plan.model), body, items.output, sample)
  })
}

async function stream (
  body: ResponsesBody,
  plan: ChatPlan,
  context: GenerationContext,
  reply: FastifyReply
): Promise<FastifyReply> {
  const sample = plan.generation.samples[0]!
  const parser = new ReplyParser(plan.reply)
  const items = new ItemEvents()
  const head = responseHead(plan.model)
  const begun = responseOf(head, body, [], null)
  const waiting: object[] = [
    { type: 'response.created', response: begun },
    { type: 'response.in_progress', response: begun }
  ]
  let started = false
  let ended = false
  let read = 0
  let number = 0
  const end = (): void => {
    ended = true
    waiting.push(...parser.finish().flatMap(delta => items.push(delta)), ...items.finish())
    const response = responseOf(head, body, items.output, sample)
    // There is no event for a cancelled response.
    const type = response.status === 'completed' ? 'response.completed' : 'response.incomplete'
    waiting.push({ type, response })
  }
  return await sendEvents(reply, {
    named: true,
    run: async notify =>
      await plan.generation.run(() => {
        started = true
        notify()
      }),
    next: () => {
      // An error before the first event of the engine becomes a status.
      if (!started) return undefined
      if (waiting.length === 0 && sample.text.length > read) {
        waiting.push(...parser.push(sample.text.slice(read)).flatMap(delta => items.push(delta)))
        read = sample.text.length
      }
      if (waiting.length === 0 && sample.finish !== null && !ended) end()
      const event = waiting.shift()
      return event === undefined ? undefined : { ...event, sequence_number: number++ }
    },
    failure: error => {
      const { code, message, param } = refusalOf(error)
      return { type: 'error', code, message, param, sequence_number: number++ }
    }
  })
}

export default responses
