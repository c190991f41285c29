import { everyTransport } from '../context.ts'
import type { Context } from '../context.ts'
import { definePromise, expect, NotOffered } from '../promise.ts'
import { pause } from './pauses.ts'

const GROUP = 'concurrency'

export const twoUpdates = definePromise(GROUP, 'two-updates', {
  title: 'Of two updates at once, one is in place as a whole at the end, under its own label.',
  ways: everyTransport(),
  check: async (context, transport) => {
    // A start that follows a start may be the same trainer after a crash, so the server takes the second for the first.
    if (context.server.kind === 'vllm') throw new NotOffered('start_weight_update names no owner of an update')
    // One group carries one broadcast at a time, so the other update comes by the base.
    if (transport === context.base && transport.name === 'distributed') throw new NotOffered('there is one group')
    const [b, c] = [context.newLabel(), context.newLabel()]
    const [first, second] = await Promise.all([
      context.send(transport, 'B', { label: b }),
      context.send(context.base, 'C', { label: c })
    ])
    expect(first.ok || second.ok, `both were refused: ${first.text}; ${second.text}`)
    const { name, detail } = await context.serving()
    expect(name === 'B' || name === 'C', `the server serves ${detail}`)
    expect(name === 'B' ? first.ok : second.ok, `the server serves ${name}, whose update was refused`)
    const label = await context.server.label()
    expect(label === null || label === (name === 'B' ? b : c), `the server serves ${name} under the label of the other`)
    return first.ok && second.ok ? 'one after the other' : `one was refused: ${(first.ok ? second : first).text}`
  }
})

export const retry = definePromise(GROUP, 'retry', {
  title: 'If a client repeats an update while it runs, both get an answer, and the update is in place.',
  ways: everyTransport(({ name }) => name !== 'distributed'),
  check: async (context, transport) => {
    const label = context.newLabel()
    const replies = await Promise.all([1, 2].map(async () => await context.send(transport, 'B', { label })))
    expect(replies.some(({ ok }) => ok), `both were refused: ${replies[0]!.text}`)
    await context.expectServing('B', 'after an update and its repetition')
    return replies.map(({ status }) => status).join(' and ')
  }
})

export const pauseAndUpdate = definePromise(GROUP, 'pause-and-update', {
  title: 'A pause, an update and a continue at once all get an answer, and the update is in place.',
  ways: ({ server }: Context) => server.pauseModes,
  check: async (context, { name }) => {
    const [, , continued] = await Promise.all([pause(context, name), context.load('B'), context.server.resume()])
    expect(continued.ok, `continuing was refused: ${continued.text}`)
    await context.server.resume()
    await context.expectServing('B', 'after a pause, an update and a continue at once')
    return undefined
  }
})
