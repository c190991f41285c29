import { Type } from 'typebox'
import type { FastifyReply } from 'fastify'
import { LoraUsed } from '../../src/http/adapters.ts'
import { VersionStamps } from '../../src/http/generation/bound-version.ts'
import { refusalOf } from '../../src/http/error-reply.ts'
import { sendEvents } from '../../src/http/event-stream.ts'
import type { GenerationContext, Routes } from '../../src/http/context.ts'
import { abortOnHangup, Generation } from '../../src/http/generation/generation.ts'
import { readGenerate, GenerateBody } from '../../src/http/sglang/generate-body.ts'
import type { GenerateJob } from '../../src/http/sglang/generate-body.ts'
import { NOTHING_SHOWN, sglangOutput } from '../../src/http/sglang/sglang-output.ts'
import type { Shown } from '../../src/http/sglang/sglang-output.ts'
import { LazyList, sendJson } from '../../src/http/json-parts.ts'
import { RoutedExperts } from '../../src/http/generation/routed-experts.ts'
import { samplingMaskFields } from '../../src/http/generation/sampling-mask.ts'
import { nullable, refusals, streamable } from '../../src/http/schemas.ts'

const MetaInfo = Type.Object({
  id: Type.String(),
  finish_reason: Type.Union([
    Type.Object({ type: Type.String() }, { description: 'stop (matched), length (length) or abort (message)' }),
    Type.Null()
  ]),
  prompt_tokens: Type.Integer(),
  completion_tokens: Type.Integer(),
  cached_tokens: Type.Integer(),
  num_retractions: Type.Integer(),
  weight_version: Type.String({ description: 'Label of the weights that made the last token.' }),
  weight_versions: Type.Array(Type.Object({ version: Type.String(), start: Type.Integer(), end: Type.Integer() }), {
    description: 'Ranges [start, end) of output tokens, each with the label of the weights that made them.'
  }),
  ...VersionStamps,
  lora: Type.Optional(LoraUsed),
  seed: nullable(Type.String(), 'The seed in use; send it as `sampling_seed` to repeat the sample.'),
  ...samplingMaskFields,
  routed_experts: Type.Optional(RoutedExperts),
  routed_experts_start_len: Type.Optional(
    Type.Integer({ description: 'Position of the first row of `routed_experts`.' })
  )
}, { title: 'MetaInfo' })

const Output = Type.Object({
  text: Type.Optional(Type.String()),
  output_ids: Type.Array(Type.Integer()),
  prompt_token_ids: Type.Optional(Type.Array(Type.Integer())),
  meta_info: MetaInfo
}, { title: 'GenerateOutput', description: 'One sample.' })

const Reply = Type.Union([Output, Type.Array(Output)])

/** SGLang's native generation endpoint. */
const generate: Routes<GenerationContext> = async (app, { context }) => {
  const summaries = { POST: 'Generate from text or token ids', PUT: 'Generate (as POST)' } as const
  for (const method of ['POST', 'PUT'] as const) {
    app.route({
      method,
      url: '/generate',
      config: { auth: 'normal' },
      schema: {
        operationId: method === 'POST' ? 'generate' : 'generatePut',
        summary: summaries[method],
        tags: ['generation'],
        body: GenerateBody,
        response: {
          200: streamable(
            Reply,
            'One sample, or a list for a batch or n above 1. With `stream`, each event has all tokens so far.'
          ),
          ...refusals()
        }
      },
      handler: async (request, reply) => await answer(context, await readGenerate(request.body, context), reply)
    })
  }
}

async function answer (
  context: GenerationContext,
  plan: GenerateJob,
  reply: FastifyReply
): Promise<unknown> {
  const generation = new Generation(context, plan.samples)
  abortOnHangup(reply, generation)
  if (plan.stream) return await stream(generation, plan, reply)
  await generation.run()
  const { samples } = generation
  const outputs = new LazyList(samples.length, i => sglangOutput(samples[i]!, plan.outputs[i]!))
  return await sendJson(reply, plan.single ? outputs.at(0) : outputs)
}

async function stream (generation: Generation, plan: GenerateJob, reply: FastifyReply): Promise<FastifyReply> {
  const changed = new Set<number>()
  const sent = generation.samples.map(() => 0)
  const shown = generation.samples.map((): Shown | null => null)
  return await sendEvents(reply, {
    run: async notify => {
      await generation.run(index => {
        const sample = generation.samples[index]!
        if (sample.finish === null && sample.tokens.length - sent[index]! < plan.streamInterval) return
        changed.add(index)
        notify()
      })
    },
    next: () => {
      const [index] = changed
      if (index === undefined) return undefined
      changed.delete(index)
      const sample = generation.samples[index]!
      sent[index] = sample.tokens.length
      const output = sglangOutput(
        sample,
        plan.outputs[index]!,
        plan.deltas ? shown[index] ?? NOTHING_SHOWN : NOTHING_SHOWN
      )
      if (plan.deltas) {
        shown[index] = {
          tokens: sample.tokens.length,
          text: sample.text.length,
          input: sample.input !== null
        }
      }
      return plan.single ? output : { ...output, index }
    },
    failure: error => {
      const { message, status, code } = refusalOf(error)
      return {
        error: {
          message,
          type: status < 500 ? 'invalid_request_error' : 'server_error',
          code: status,
          refit_code: code,
          retryable: status === 503
        }
      }
    }
  })
}

export default generate
