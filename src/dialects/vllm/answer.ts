import type { FastifyReply } from 'fastify'
import { stampsOf } from '../../http/generation/bound-version.ts'
import type { GenerationContext } from '../../http/context.ts'
import { refusalBody, refusalOf } from '../../http/error-reply.ts'
import { sendEvents } from '../../http/event-stream.ts'
import { abortOnHangup, Generation } from '../../http/generation/generation.ts'
import { LazyList, sendJson } from '../../http/json-parts.ts'
import { usageOf } from '../../http/openai/openai-output.ts'
import type { VllmGeneratePlan } from './generate.ts'
import { scoresNpy, vllmChoice, vllmPromptLogprobs } from './output.ts'

/** Runs a request and replies in vLLM's form. */
export async function replyVllm (
  context: GenerationContext,
  plan: VllmGeneratePlan,
  reply: FastifyReply
): Promise<unknown> {
  const generation = new Generation(context, plan.samples)
  abortOnHangup(reply, generation)
  if (plan.stream) return await stream(generation, plan, reply)
  await generation.run()
  const { samples } = generation
  return await sendJson(reply, {
    request_id: plan.id,
    model: plan.model,
    ...samples[0]!.lora === undefined ? {} : { lora: samples[0]!.lora },
    created: Math.floor(Date.now() / 1000),
    output_mode: plan.output.tokenizer === null ? 'tokens' : 'text',
    choices: new LazyList(samples.length, i => vllmChoice(samples[i]!, i, plan.output)),
    usage: usageOf(samples, samples.length),
    prompt_logprobs: vllmPromptLogprobs(samples, plan.output),
    prompt_token_ids: plan.promptIds ? Array.from(plan.samples[0]!.promptIds) : null,
    ...stampsOf(samples),
    prompt_token_id_logprobs: scoresNpy(samples[0]!, plan.output.scores),
    metrics: null,
    kv_transfer_params: null
  })
}

async function stream (generation: Generation, plan: VllmGeneratePlan, reply: FastifyReply): Promise<FastifyReply> {
  const { samples } = generation
  const changed = new Set<number>()
  const sent = samples.map(() => ({ tokens: 0, text: 0 }))
  let first = true
  let usageDue = false
  const head = (): object => ({
    request_id: plan.id,
    ...first && plan.promptIds ? { prompt_token_ids: Array.from(plan.samples[0]!.promptIds) } : {},
    output_mode: plan.output.tokenizer === null ? 'tokens' : 'text'
  })
  return await sendEvents(reply, {
    run: async notify => {
      await generation.run(index => {
        changed.add(index)
        notify()
      })
      usageDue = plan.usage
    },
    next: () => {
      for (const index of changed) {
        changed.delete(index)
        const sample = samples[index]!
        const last = sent[index]!
        if (sample.finish === null && sample.tokens.length === last.tokens) continue
        const event = {
          ...head(),
          choices: [vllmChoice(sample, index, plan.output, last)],
          ...plan.usage ? { usage: null } : {}
        }
        sent[index] = { tokens: sample.tokens.length, text: sample.text.length }
        first = false
        return event
      }
      if (!usageDue) return undefined
      usageDue = false
      return { ...head(), choices: [], usage: usageOf(samples, samples.length), ...stampsOf(samples) }
    },
    failure: error => refusalBody('openai', refusalOf(error))
  })
}
