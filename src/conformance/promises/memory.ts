import type { Context } from '../context.ts'
import { NoReply } from '../http-target.ts'
import { definePromise, expect, NotOffered } from '../promise.ts'

const GROUP = 'memory'
/** How long a request may wait before it counts as held. */
const HELD_MS = 2000

/** Runs while the server's memory is released, and resumes it. */
async function whileAsleep<T> ({ server }: Context, run: () => Promise<T>): Promise<T> {
  const { ok, status, text } = await server.releaseMemory()
  if (status === 404 || status === 405) throw new NotOffered(text)
  try {
    expect(ok, `an idle server refused to release its memory: ${text}`)
    return await run()
  } finally {
    await server.resumeMemory()
    await server.resume()
  }
}

export const asleep = definePromise(GROUP, 'asleep', {
  title: 'While memory is released and after it is resumed, the server answers with A or refuses.',
  check: async context => {
    const { references, server } = context
    const during = await whileAsleep(context, async () => {
      const control = AbortSignal.timeout(HELD_MS)
      return await server.tryGenerate(references.prompts[0]!, { tokens: 1, signal: control }).catch(error => {
        if (error instanceof NoReply) return null
        throw error
      })
    })
    const { name, detail } = await context.serving()
    expect(name === 'A' || name === 'none', `after memory was resumed, the server serves ${detail}`)
    await context.load('B')
    await context.expectServing('B', 'after an update')
    const held = during === null ? 'requests were held' : during.ok ? 'requests were served' : `refused: ${during.text}`
    return `${held}; then ${detail}`
  }
})

export const updateAsleep = definePromise(GROUP, 'update-asleep', {
  title: 'An update while memory is released is refused or complete, and the server lives.',
  check: async context => {
    const reply = await whileAsleep(context, async () => {
      const reply = await context.send(context.base, 'B', { label: context.newLabel() })
      return reply
    })
    const { name, detail } = await context.serving()
    const isHonest = name === 'none' || name === (reply.ok ? 'B' : 'A')
    expect(isHonest, `the update was answered with ${reply.text}; then the server serves ${detail}`)
    await context.load('C')
    await context.expectServing('C', 'after an update')
    return reply.text
  }
})
