import type { FastifyReply } from 'fastify'
import {
  planTrlChat,
  planTrlGenerate,
  TrlChatBody,
  TrlGenerateBody,
  TrlReply,
  trlReply
} from '../../src/dialects/trl/generate.ts'
import type { TrlPlan } from '../../src/dialects/trl/generate.ts'
import { planTrlScores, TrlScoresBody, TrlScoresReply, trlScores } from '../../src/dialects/trl/scores.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { abortOnHangup, Generation } from '../../src/http/generation/generation.ts'
import { sendJson } from '../../src/http/json-parts.ts'
import { refusals } from '../../src/http/schemas.ts'

/** Generation routes of TRL's `vllm-serve`; all their paths end in a slash. */
const trlGenerate: Routes<GenerationContext> = async (app, { context }) => {
  const normal = { auth: 'normal' } as const

  app.post('/generate/', {
    config: normal,
    schema: {
      operationId: 'trlGenerate',
      summary: 'Generate from texts or token ids (TRL)',
      tags: ['generation'],
      body: TrlGenerateBody,
      response: { 200: TrlReply, ...refusals() }
    }
  }, async (request, reply) => await complete(await planTrlGenerate(request.body, context), reply))

  app.post('/chat/', {
    config: normal,
    schema: {
      operationId: 'trlChat',
      summary: 'Answer conversations (TRL)',
      tags: ['generation'],
      body: TrlChatBody,
      response: { 200: TrlReply, ...refusals() }
    }
  }, async (request, reply) => await complete(await planTrlChat(request.body, context), reply))

  app.post('/get_sequence_logprobs/', {
    config: normal,
    schema: {
      operationId: 'trlSequenceLogprobs',
      summary: 'Score given token ids (TRL)',
      tags: ['generation'],
      body: TrlScoresBody,
      response: { 200: TrlScoresReply, ...refusals() }
    }
  }, async (request, reply) => {
    const plan = planTrlScores(request.body, context)
    const generation = new Generation(context, plan.samples)
    abortOnHangup(reply, generation)
    await generation.run()
    return await sendJson(reply, await trlScores(plan, generation.samples))
  })

  async function complete (plan: TrlPlan, reply: FastifyReply): Promise<FastifyReply> {
    const generation = new Generation(context, plan.samples)
    abortOnHangup(reply, generation)
    await generation.run()
    return await sendJson(reply, trlReply(plan, generation.samples))
  }
}

export default trlGenerate
