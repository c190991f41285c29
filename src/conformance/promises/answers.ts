import { expectAttributed, scoreUnder } from '../attribute.ts'
import { everyTransport } from '../context.ts'
import type { Context } from '../context.ts'
import { definePromise, expect, NotOffered } from '../promise.ts'
import type { Way } from '../promise.ts'
import type { Answer, PauseEffect } from '../servers/server.ts'
import { requireLabel } from './labels.ts'
import { gap } from '../references.ts'
import type { VariantName } from '../variants.ts'
import { longAnswer, pause, resume } from './pauses.ts'

const GROUP = 'answers'
const REQUESTS = 4
const ATTEMPTS = 5
/** Pauses that a long request notices. */
const MUST_INTERRUPT: ReadonlySet<PauseEffect | null> = new Set(['abort', 'recompute', 'freeze'])

interface Interruption extends Way {
  /** Null: the update comes without a pause. */
  mode: string | null
  effect: PauseEffect | null
}

function interruptions ({ server }: Context): readonly Interruption[] {
  return [
    { name: 'no pause', mode: null, effect: null },
    ...server.pauseModes.map(({ name, effect }) => ({ name, mode: name, effect }))
  ]
}

export const tokensNameVersion = definePromise(GROUP, 'tokens-name-version', {
  title: 'Across an update, every token has the label of the weights that made it.',
  ways: interruptions,
  check: async (context, way) => {
    // A request may end before the pause arrives, and only one that runs across the update shows anything.
    for (let attempt = 1; attempt <= ATTEMPTS; attempt++) {
      const answers = await interrupt(context, way)
      const across = answers.filter(({ versions, finish }) => versions!.length > 1 || finish === 'abort').length
      if (across > 0 || !MUST_INTERRUPT.has(way.effect)) return `${across} of ${REQUESTS} requests were interrupted`
    }
    throw new NotOffered('no request was still running when the pause began')
  }
})

/** Requests that an update interrupts. Throws Broken if a token has the label of other weights. */
async function interrupt (context: Context, { mode, effect }: Interruption): Promise<Answer[]> {
  const prompts = Array.from({ length: REQUESTS }, (_, i) => context.prompt(10 + i, 16))
  const requests = prompts.map(prompt => context.ask(prompt, longAnswer(context)))
  await context.whenRunning()
  const labels = new Map<string, VariantName>([[await requireLabel(context), 'A']])
  if (mode !== null) await pause(context, mode)
  labels.set(await context.load('B'), 'B')
  if (mode !== null) await resume(context)
  const answers = await Promise.all(requests)
  if (answers.every(({ versions }) => versions === null)) throw new NotOffered('answers name no weight version')
  const asked = answers.map((answer, i) => ({ prompt: prompts[i]!, scored: { answer, scores: {} } }))
  await scoreUnder(context, 'B', asked)
  await context.load('A')
  await scoreUnder(context, 'A', asked)
  // Frozen requests go on with the keys of the old weights, which no other weights would have made.
  const isStale = effect === 'freeze' ? (span: number) => span > 0 : undefined
  for (const { scored } of asked) expectAttributed(context, scored, labels, isStale)
  return answers
}

export const noStaleCache = definePromise(GROUP, 'no-stale-cache', {
  title: 'A prompt that was answered before an update is answered anew after it, not from its old prefix cache.',
  ways: everyTransport(),
  check: async (context, transport) => {
    const { references, server } = context
    const prompt = context.prompt(20, Math.min(192, Math.floor(context.model.contextLength / 4)))
    for (let i = 0; i < 2; i++) await server.generate(prompt, { tokens: 8 })
    await context.load('B', transport)
    const { tokens, logprobs } = await server.generate(prompt, { tokens: 8 })
    const scored = (await server.score([...prompt, ...tokens])).slice(prompt.length - 1)
    const away = Math.max(...logprobs.map((logprob, i) => gap(logprob, scored[i]!)))
    expect(
      away <= references.tolerance.output,
      `an answer to a known prompt is ${away.toFixed(3)} away from what the new weights say`
    )
    return undefined
  }
})
