import { everyTransport, transportsNamed } from '../context.ts'
import type { Context, Serving } from '../context.ts'
import { definePromise, expect } from '../promise.ts'
import type { DistributedTransport } from '../transports/distributed.ts'
import type { Transport } from '../transports/transport.ts'

const GROUP = 'senders'
const ways = everyTransport(({ hold }) => hold !== undefined)

/** Kills the sender after `share` of the tensors. Returns what is served once that has settled, and the label. */
async function killAfter (
  context: Context,
  transport: Transport,
  share: number
): Promise<{ serving: Serving, label: string | null, sent: string }> {
  const { tensors } = context.variants.B
  const sent = context.newLabel()
  const held = await transport.hold!(tensors, { label: sent })
  await held.release(Math.floor(tensors.length * share)).catch(() => {})
  await held.kill()
  await held.reply.catch(() => {})
  const serving = await context.settled()
  return { serving, label: await context.server.label(), sent }
}

/** A new sender sends all of B. */
async function expectHealed (context: Context, transport: Transport): Promise<void> {
  await context.server.giveUp()
  await context.load('B', transport)
  await context.expectServing('B', 'after a whole update by a new sender')
}

export const beforeBytes = definePromise(GROUP, 'killed-before-bytes', {
  title: 'If a sender is killed after its announcement, nothing has changed, and a new sender can update.',
  ways,
  check: async (context, transport) => {
    const { serving, label, sent } = await killAfter(context, transport, 0)
    expect(serving.name === 'A', `the server serves ${serving.detail}`)
    expect(label !== sent, `the label moved to "${sent}"`)
    await expectHealed(context, transport)
    return undefined
  }
})

export const midBytes = definePromise(GROUP, 'killed-mid-bytes', {
  title: 'If a sender is killed in the middle, the server serves A or refuses, never a mixture, until it is updated.',
  ways,
  check: async (context, transport) => {
    const { serving, label, sent } = await killAfter(context, transport, 0.5)
    expect(serving.name === 'A' || serving.name === 'none', `the server serves ${serving.detail}`)
    expect(label !== sent, `the label moved to "${sent}"`)
    await expectHealed(context, transport)
    return serving.name === 'A' ? 'nothing had changed' : serving.detail
  }
})

export const afterBytes = definePromise(GROUP, 'killed-after-bytes', {
  title: 'If a sender is killed before it reads the reply, the server has all of the update and its label, or nothing.',
  ways,
  check: async (context, transport) => {
    const { serving, label, sent } = await killAfter(context, transport, 1)
    expect(serving.name === 'A' || serving.name === 'B', `the server serves ${serving.detail}`)
    if (label !== null) {
      const moved = label === sent
      expect(moved === (serving.name === 'B'), `the server serves ${serving.detail} under the label "${label}"`)
    }
    await expectHealed(context, transport)
    return serving.name === 'B' ? 'the update was complete' : 'nothing had changed'
  }
})

export const beforeJoin = definePromise(GROUP, 'killed-before-join', {
  title: 'If a trainer is killed before it joins its group, the server goes on, and a new trainer can update.',
  ways: transportsNamed('distributed'),
  check: async (context, transport: DistributedTransport) => {
    await transport.close()
    const sender = await transport.start()
    const init = transport.init(sender).catch(() => null)
    // The server has counted its ranks in the store, or has been refused.
    await sender.store.waitForWorkers(sender.size, { timeoutMs: context.server.target.patienceMs }).catch(() => {})
    await sender.kill()
    await context.expectServing('A', 'after a trainer was killed before it joined')
    await context.server.destroyGroup(sender.name)
    await init
    await expectHealed(context, transport)
    return undefined
  }
})
