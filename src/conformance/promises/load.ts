import { everyTransport } from '../context.ts'
import type { Context } from '../context.ts'
import { NoReply } from '../http-target.ts'
import { Broken, definePromise, expect } from '../promise.ts'
import { ANSWER_TOKENS, gap, PROMPTS } from '../references.ts'
import type { Answer } from '../servers/server.ts'
import type { VariantName } from '../variants.ts'

const GROUP = 'load'
const CLIENTS = 8
const UPDATES: readonly VariantName[] = ['B', 'C', 'A', 'B', 'A', 'C', 'B', 'A']

interface Tally {
  answers: number
  refused: number
}

export const underLoad = definePromise(GROUP, 'under-load', {
  title: 'While weights are replaced under load, every answer is that of the weights that it names.',
  ways: everyTransport(),
  check: async (context, transport) => {
    const labels = new Map<string, VariantName>([[context.home, 'A']])
    const tally: Tally = { answers: 0, refused: 0 }
    const run = { isOver: false }
    const clients = Array.from({ length: CLIENTS }, async (_, i) => {
      for (let turn = i; !run.isOver; turn++) await askOnce(context, turn % PROMPTS, labels, tally)
    })
    const updates = (async () => {
      try {
        for (const name of UPDATES) {
          const label = context.newLabel()
          labels.set(label, name)
          const reply = await context.send(transport, name, { label })
          expect(reply.ok, `a correct update to ${name} under load was refused: ${reply.text}`)
        }
      } finally {
        run.isOver = true
      }
    })()
    const results = await Promise.allSettled([updates, ...clients])
    const failed = results.find(result => result.status === 'rejected')
    if (failed !== undefined) throw (failed as PromiseRejectedResult).reason
    await context.expectServing('A', 'after the last update')
    const refused = tally.refused === 0 ? '' : `, ${tally.refused} requests were refused`
    return `${UPDATES.length} updates, ${tally.answers} answers${refused}`
  }
})

/** A refusal is clean: the request can be repeated. A wrong answer is not. */
async function askOnce (
  context: Context,
  prompt: number,
  labels: ReadonlyMap<string, VariantName>,
  tally: Tally
): Promise<void> {
  const { references, server } = context
  let answer: Answer
  try {
    answer = await server.generate(references.prompts[prompt]!, { tokens: ANSWER_TOKENS })
  } catch (error) {
    const isRefusal = error instanceof Broken && !(error instanceof NoReply) && /answered 5/.test(error.message)
    if (!isRefusal) throw error
    tally.refused++
    return
  }
  tally.answers++
  const names = answer.versions === null || answer.versions.length === 0
    ? (['A', 'B', 'C'] as const)
    : [labels.get(answer.versions[0]!.version)]
  if (names[0] === undefined) throw new Broken(`an answer names the version "${answer.versions![0]!.version}"`)
  const end = answer.versions?.[0]?.end ?? answer.tokens.length
  if (names.some(name => isAnswerOf(context, answer, name!, prompt, end))) return
  const others = (['A', 'B', 'C'] as const).filter(name => isAnswerOf(context, answer, name, prompt, end))
  throw new Broken(
    `an answer that is labelled as of ${names.join(' or ')} is that of ${others.join(' and ') || 'no variant'}`
  )
}

/** Whether the first `end` tokens are those of the variant, up to a tie that rounding decides. */
function isAnswerOf (context: Context, answer: Answer, name: VariantName, prompt: number, end: number): boolean {
  const limit = context.references.tolerance.output
  const known = context.references.get(name).answers[prompt]!
  for (let i = 0; i < Math.min(end, answer.tokens.length); i++) {
    // Both tokens of a tie have nearly the same logprob.
    if (gap(answer.logprobs[i]!, known.logprobs[i]!) > limit) return false
    if (answer.tokens[i] !== known.tokens[i]) return true
  }
  return true
}
