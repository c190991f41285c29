import { transportsNamed } from '../context.ts'
import type { Context } from '../context.ts'
import { definePromise, expect } from '../promise.ts'
import { listsOf } from '../transports/distributed.ts'
import type { DistributedTransport } from '../transports/distributed.ts'
import type { BroadcastLists } from '../servers/server.ts'

const GROUP = 'groups'
const ways = transportsNamed('distributed')
/** How long the server may look for a trainer that never comes, in this check. */
const ABSENT_MS = 2000

/** A promise that lists which do not fit together are refused, and that a new group works afterwards. */
function badLists (id: string, title: string, change: (lists: BroadcastLists) => BroadcastLists): ReturnType<
  typeof definePromise
> {
  return definePromise(GROUP, id, {
    title,
    ways,
    check: async (context, transport: DistributedTransport) => {
      const { tensors } = context.variants.B
      const reply = await transport.sendAs(change(listsOf(tensors)), [], { label: context.newLabel() })
      const said = await context.expectRefusal(reply, 'an update with false lists')
      await transport.close()
      await context.load('B', transport)
      await context.expectServing('B', 'after a good update in a new group')
      return said
    }
  })
}

export const unequalLists = badLists(
  'unequal-lists',
  'Lists of different lengths are refused at once, and a new group works.',
  lists => ({ ...lists, shapes: lists.shapes.slice(0, 1) })
)

export const unknownDtype = badLists(
  'unknown-dtype',
  'A dtype that does not exist is refused at once, and a new group works.',
  lists => ({ ...lists, dtypes: lists.dtypes.map(() => 'bfloat17') })
)

export const unknownGroup = definePromise(GROUP, 'unknown-group', {
  title: 'An update in a group that does not exist is refused.',
  ways,
  check: async (context, transport) => {
    await transport.close()
    const lists = listsOf(context.variants.B.tensors)
    const reply = await context.server.receive('conformance-unknown', lists, context.newLabel())
    return await context.expectRefusal(reply, 'an update in an unknown group')
  }
})

export const destroyUnknown = definePromise(GROUP, 'destroy-unknown', {
  title: 'Leaving a group that does not exist gets an answer and changes nothing.',
  ways,
  check: async (context, transport) => {
    await transport.close()
    const { text } = await context.server.destroyGroup('conformance-unknown')
    await context.expectServing('A', 'after leaving an unknown group')
    return text
  }
})

export const sameName = definePromise(GROUP, 'same-name', {
  title: 'A group can be left and made again under the same name and port.',
  ways,
  check: async (context, transport: DistributedTransport) => {
    await transport.close()
    let port = 0
    for (const [round, name] of (['B', 'C', 'B'] as const).entries()) {
      const sender = await transport.start({ name: 'conformance-again', port })
      port = sender.store.address.port
      const joining = sender.join(context.server.target.patienceMs).catch((error: Error) => error)
      try {
        const reply = await transport.init(sender)
        expect(reply.ok, `the group was refused in round ${round + 1}: ${reply.text}`)
        const error = await joining
        expect(!(error instanceof Error), `the group was not made in round ${round + 1}: ${String(error)}`)
        const { tensors } = context.variants[name]
        const update = context.server.receive(sender.name, listsOf(tensors), undefined)
        for (const { bytes } of tensors) await sender.broadcast(bytes()).catch(() => {})
        expect((await update).ok, `round ${round + 1} was refused: ${(await update).text}`)
        await context.expectServing(name, `after round ${round + 1}`)
        const left = await context.server.destroyGroup(sender.name)
        expect(left.ok, `the group could not be left in round ${round + 1}: ${left.text}`)
      } finally {
        await sender.kill()
        await joining
      }
    }
    return 'three rounds'
  }
})

export const absentTrainer = definePromise(GROUP, 'absent-trainer', {
  title: 'While a group waits for a trainer that never comes, the server generates and takes other updates.',
  ways,
  check: async (context, transport: DistributedTransport) => {
    await transport.close()
    const sender = await transport.start()
    const { address: { port } } = sender.store
    await sender.kill()
    const { name, size, host } = sender
    const init = context.server.initGroup({ address: host, port, worldSize: size, name }).catch(error => error as Error)
    // Only a delay: if the server answers later, the check is the same.
    await Promise.race([init, new Promise(resolve => setTimeout(resolve, ABSENT_MS / 4))])
    await expectUsable(context, 'while a group waits for its trainer')
    await context.server.destroyGroup(name)
    const reply = await Promise.race([init, new Promise<null>(resolve => setTimeout(resolve, ABSENT_MS, null))])
    if (reply === null || reply instanceof Error) return 'the call was still waiting'
    expect(!reply.ok, `a group without a trainer was reported as made: ${reply.text}`)
    return reply.text
  }
})

async function expectUsable (context: Context, when: string): Promise<void> {
  const { ok, text } = await context.server.health()
  expect(ok, `${when}, /health answered ${text}`)
  await context.expectServing('A', when)
  if (context.base.name === 'distributed') return
  await context.load('B')
  await context.expectServing('B', `after an update by ${context.base.name} ${when}`)
}
