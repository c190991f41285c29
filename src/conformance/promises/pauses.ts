import type { Context } from '../context.ts'
import { definePromise, expect, NotOffered, Refused } from '../promise.ts'
import { difference } from '../references.ts'
import type { PauseEffect, PauseMode } from '../servers/server.ts'

const GROUP = 'pauses'
/** How long a request must wait to count as held. */
const HOLD_MS = 500
const REQUESTS = 4
const ROUNDS = 3
const ways = ({ server }: Context): readonly PauseMode[] => server.pauseModes

export async function pause (context: Context, mode: string): Promise<void> {
  const { ok, status, text } = await context.server.pause(mode)
  if (status === 404 || status === 405) throw new NotOffered(text)
  expect(ok, `a pause with mode ${mode} was refused: ${text}`)
}

export async function resume (context: Context): Promise<void> {
  const { ok, text } = await context.server.resume()
  expect(ok, `continuing was refused: ${text}`)
}

/** Tokens of a request that should outlast a few calls. */
export function longAnswer ({ model }: Context): number {
  return Math.min(1536, Math.floor(model.contextLength * 0.75))
}

/** vLLM's pauses with abort and wait refuse new requests instead of holding them. */
function notHeld (error: unknown): never {
  const isRefused = error instanceof Refused && error.status === 503
  throw isRefused ? new NotOffered(`new requests are refused: ${error.message}`) : error
}

export const holds = definePromise(GROUP, 'holds', {
  title: 'A request that arrives during a pause is answered after the end of the pause.',
  ways,
  check: async (context, { name }) => {
    await pause(context, name)
    let isOver = false
    let early = false
    const request = context.ask(context.prompt(2, 16), 8)
    void request.then(() => {
      early = !isOver
    }, () => {})
    await new Promise(resolve => setTimeout(resolve, HOLD_MS))
    isOver = true
    await resume(context)
    const { tokens } = await request.catch(notHeld)
    expect(!early, 'the request was answered during the pause')
    expect(tokens.length === 8, `the request ended with ${tokens.length} of 8 tokens`)
    return undefined
  }
})

export const heldGetsNew = definePromise(GROUP, 'held-gets-new', {
  title: 'A request that arrives during a pause is answered by the weights that the pause was for.',
  ways,
  check: async (context, { name }) => {
    const { references } = context
    await pause(context, name)
    const request = context.ask(references.prompts[0]!, 8)
    const label = await context.load('B')
    await resume(context)
    const { tokens, logprobs, versions } = await request.catch(notHeld)
    const known = references.get('B').answers[0]!
    const limit = references.tolerance.output
    const count = agreeing(tokens, known.tokens)
    const away = difference(logprobs.slice(0, count), known.logprobs.slice(0, count))
    expect(count > 0 && away <= limit, 'the answer is not that of the new weights')
    const named = [...new Set(versions?.map(({ version }) => version))].join(', ')
    expect(versions === null || named === label, `the answer names "${named}", not "${label}"`)
    return undefined
  }
})

/** Tokens that both begin with; all of them if a server is exact. */
function agreeing (a: readonly number[], b: readonly number[]): number {
  const end = a.findIndex((token, i) => token !== b[i])
  return end < 0 ? a.length : end
}

export const running = definePromise(GROUP, 'running', {
  title: 'Requests that run when a pause begins end with it (abort), or get all their tokens.',
  ways,
  check: async (context, { name, effect }) => {
    let ended = 0
    // A request may end before the pause arrives.
    for (let round = 0; round < ROUNDS; round++) ended += await pauseRunning(context, name, effect)
    if (effect !== 'abort') return `${ROUNDS * REQUESTS} requests`
    if (ended === 0) throw new NotOffered('no request was still running when the pause began')
    return `${ended} requests were ended`
  }
})

/** Pauses while requests run, and continues. Returns the number of requests that got fewer tokens than they wanted. */
async function pauseRunning (context: Context, mode: string, effect: PauseEffect): Promise<number> {
  const wanted = longAnswer(context)
  const requests = Array.from({ length: REQUESTS }, (_, i) => context.ask(context.prompt(i, 16), wanted))
  await context.whenRunning()
  await pause(context, mode)
  await resume(context)
  const answers = await Promise.all(requests)
  const cut = answers.filter(({ tokens }) => tokens.length < wanted)
  for (const { finish, tokens } of cut) {
    const isRight = effect === 'abort' && finish === 'abort'
    expect(isRight, `a request ended early, with ${tokens.length} of ${wanted} tokens and the reason "${finish}"`)
  }
  return cut.length
}

export const update = definePromise(GROUP, 'update', {
  title: 'An update inside a pause is complete after the pause.',
  ways,
  check: async (context, { name }) => {
    for (const variant of ['B', 'C'] as const) {
      await pause(context, name)
      await context.load(variant)
      await resume(context)
      await context.expectServing(variant, `after an update to ${variant} inside a pause`)
    }
    return 'two pauses'
  }
})

export const twice = definePromise(GROUP, 'twice', {
  title: 'Pausing twice and continuing twice is the same as once.',
  ways,
  check: async (context, { name }) => {
    await pause(context, name)
    await pause(context, name)
    await resume(context)
    await context.expectServing('A', 'after two pauses and one continue')
    await resume(context)
    await context.expectServing('A', 'after a second continue')
    return undefined
  }
})

export const unknownMode = definePromise(GROUP, 'unknown-mode', {
  title: 'An unknown pause mode is refused, and generation goes on.',
  check: async context => {
    const { ok, status, text } = await context.server.pause('conformance')
    if (status === 404 || status === 405) throw new NotOffered(text)
    expect(!ok, `the mode "conformance" was accepted: ${text}`)
    await context.expectServing('A', 'after an unknown pause mode')
    return text
  }
})
