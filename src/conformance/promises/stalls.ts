import { everyTransport } from '../context.ts'
import type { Context } from '../context.ts'
import { definePromise, expect } from '../promise.ts'
import type { Transport } from '../transports/transport.ts'
import { pause, resume } from './pauses.ts'

const GROUP = 'stalls'
const PROBES = 5
/** A generous bound: trainers probe with a few seconds. */
const HEALTH_MS = 5000

async function expectHealthy ({ server }: Context, when: string): Promise<void> {
  for (let i = 0; i < PROBES; i++) {
    const { status, text } = await server.health(HEALTH_MS)
    expect(status === 200, `${when}, /health answered ${text}`)
  }
}

/** Runs while an update to B waits for the bytes after `share` of its tensors, and completes it. */
async function whileHeld (
  context: Context,
  transport: Transport,
  share: number,
  run: () => Promise<void>
): Promise<void> {
  const { tensors } = context.variants.B
  const count = Math.floor(tensors.length * share)
  const held = await transport.hold!(tensors)
  try {
    await held.release(count)
    await run()
    await held.release(tensors.length - count)
    const { ok, text } = await held.reply
    expect(ok, `a correct update was refused: ${text}`)
  } catch (error) {
    await held.kill()
    throw error
  }
  await context.expectServing('B', 'after the update')
}

export const healthInUpdate = definePromise(GROUP, 'health-in-update', {
  title: 'The health check answers while an update waits for its sender.',
  ways: everyTransport(({ hold }) => hold !== undefined),
  check: async (context, transport) => {
    for (const share of [0, 0.5]) {
      await whileHeld(context, transport, share, async () => {
        await expectHealthy(context, `after ${share * 100} % of the tensors`)
      })
    }
    return 'before the bytes and in the middle'
  }
})

export const generateInUpdate = definePromise(GROUP, 'generate-in-update', {
  title: 'While a sender has announced its tensors and sends nothing, the server generates.',
  ways: everyTransport(({ hold }) => hold !== undefined),
  check: async (context, transport) => {
    await whileHeld(context, transport, 0, async () => {
      await context.expectServing('A', 'while a sender sends nothing')
    })
    return undefined
  }
})

export const healthInPause = definePromise(GROUP, 'health-in-pause', {
  title: 'The health check answers during a pause.',
  ways: ({ server }: Context) => server.pauseModes,
  check: async (context, { name }) => {
    await pause(context, name)
    await expectHealthy(context, 'during a pause')
    await resume(context)
    return undefined
  }
})
