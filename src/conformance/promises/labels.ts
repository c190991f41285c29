import { everyTransport } from '../context.ts'
import type { Context } from '../context.ts'
import { Broken, definePromise, expect, NotOffered } from '../promise.ts'
import type { Transport } from '../transports/transport.ts'

const GROUP = 'labels'
const ROUNDS = 4

/** The label; throws NotOffered if the server has none. */
export async function requireLabel ({ server }: Context): Promise<string> {
  const label = await server.label()
  if (label === null) throw new NotOffered('the server has no weight version')
  return label
}

export const moves = definePromise(GROUP, 'moves', {
  title: 'After an update with a label, the server and its answers have that label.',
  ways: everyTransport(),
  check: async (context, transport) => {
    await requireLabel(context)
    const label = await context.load('B', transport)
    const now = await requireLabel(context)
    expect(now === label, `after an update to "${label}" the label is "${now}"`)
    const { versions } = await context.server.generate(context.prompt(1, 8), { tokens: 4 })
    if (versions === null) return 'answers name no version'
    const named = [...new Set(versions.map(({ version }) => version))].join(', ')
    expect(named === label, `after an update to "${label}" an answer names "${named}"`)
    return undefined
  }
})

export const stays = definePromise(GROUP, 'stays', {
  title: 'An update without a label leaves the label.',
  ways: everyTransport(),
  check: async (context, transport) => {
    const before = await requireLabel(context)
    const reply = await context.send(transport, 'B')
    expect(reply.ok, `a correct update without a label was refused: ${reply.text}`)
    const after = await requireLabel(context)
    expect(after === before, `the label moved from "${before}" to "${after}"`)
    return undefined
  }
})

export const notEarly = definePromise(GROUP, 'not-early', {
  title: 'Who sees the new label gets the new weights.',
  ways: everyTransport(),
  check: async (context, transport) => {
    await requireLabel(context)
    if (transport.hold !== undefined) return await watchHeld(context, transport)
    for (let round = 0; round < ROUNDS; round++) await watchLabel(context, transport, round % 2 === 0 ? 'B' : 'A')
    return `${ROUNDS} updates were watched`
  }
})

/** Half of the bytes have been sent: the label must be the old one. */
async function watchHeld (context: Context, transport: Transport): Promise<string> {
  const { tensors } = context.variants.B
  const half = Math.floor(tensors.length / 2)
  const label = context.newLabel()
  const held = await transport.hold!(tensors, { label })
  try {
    for (const count of [0, half]) {
      await held.release(count)
      const now = await requireLabel(context)
      expect(now !== label, `the label was "${label}" after ${count} of ${tensors.length} tensors`)
    }
    await held.release(tensors.length - half)
    const reply = await held.reply
    expect(reply.ok, `a correct update was refused: ${reply.text}`)
  } catch (error) {
    await held.kill()
    throw error
  }
  const now = await requireLabel(context)
  expect(now === label, `after an update to "${label}" the label is "${now}"`)
  await context.expectServing('B', 'after the update')
  return 'half of the bytes were held back'
}

async function watchLabel (context: Context, transport: Transport, name: 'A' | 'B'): Promise<void> {
  const label = context.newLabel()
  const run = { isDone: false }
  const update = context.send(transport, name, { label }).finally(() => {
    run.isDone = true
  })
  update.catch(() => {})
  while (!run.isDone) {
    if (await context.server.label() !== label) continue
    await context.expectServing(name, `with the label "${label}"`)
    break
  }
  const reply = await update
  if (!reply.ok) throw new Broken(`a correct update was refused: ${reply.text}`)
}

export const alone = definePromise(GROUP, 'alone', {
  title: 'The label can be moved alone, and then no weight changes.',
  check: async context => {
    await requireLabel(context)
    const label = context.newLabel()
    const reply = await context.server.setLabel(label)
    if (reply.status === 404) throw new NotOffered(reply.text)
    expect(reply.ok, `a new label was refused: ${reply.text}`)
    const now = await requireLabel(context)
    expect(now === label, `the label is "${now}", not "${label}"`)
    await context.expectServing('A', 'after the label was moved')
    return undefined
  }
})
