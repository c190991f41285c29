import t from 'tap'
import { AdapterRequests } from '../../src/engine/adapter-requests.ts'
import type { AdapterStore } from '../../src/adapters/adapter-store.ts'
import type { GenerateRequest, TokenEvent } from '../../src/contract/rollout-engine.ts'
import { makeRequest } from '../helpers/scheduler-harness.ts'

// Slots are given by the tests; tokens come from nowhere.

class Slots {
  /** Requests that hold a slot. */
  held = 0
  readonly #waiting: (() => void)[] = []

  give (): void {
    this.#waiting.shift()!()
  }

  async enter (_: string, signal: AbortSignal): Promise<{ slot: number, version: number, release: () => void }> {
    await new Promise<void>((resolve, reject) => {
      this.#waiting.push(resolve)
      signal.addEventListener('abort', () => {
        const { reason } = signal
        if (reason instanceof Error) reject(reason)
      })
    })
    this.held++
    return {
      slot: 1,
      version: 7,
      release: () => {
        this.held--
      }
    }
  }
}

async function* endless (): AsyncGenerator<TokenEvent> {
  for (let n = 1;; n++) yield await Promise.resolve({ completionTokens: n, finish: null } as TokenEvent)
}

function made (): { slots: Slots, requests: AdapterRequests, request: GenerateRequest } {
  const slots = new Slots()
  const requests = new AdapterRequests(slots as unknown as AdapterStore, endless, { version: () => 'v', limit: 1 })
  return { slots, requests, request: { ...makeRequest([1]), rid: 'a', adapter: 'policy' } }
}

/** A request whose first read waits for a slot. */
async function waiting (): Promise<
  & ReturnType<typeof made>
  & { events: AsyncIterableIterator<TokenEvent>, first: Promise<IteratorResult<TokenEvent>> }
> {
  const all = made()
  const events = all.requests.generate(all.request)
  const first = events.next()
  await new Promise(setImmediate)
  return { ...all, events, first }
}

t.test('a reader that stops while it waits for a slot leaves the queue', async t => {
  const { slots, requests, events, first } = await waiting()
  t.equal(requests.waiting, 1)
  await events.return!()
  t.equal((await first).done, true)
  t.equal(requests.waiting, 0)
  t.equal(slots.held, 0)
})

t.test('a reader that stops early gives its slot back, and its events name the version', async t => {
  const { slots, events, first } = await waiting()
  slots.give()
  t.equal(((await first).value as TokenEvent).adapterVersion, 7)
  t.equal(slots.held, 1)
  await events.return!()
  t.equal(slots.held, 0)
})

t.test('an abort while it waits is an event, and a second request of the same name is refused', async t => {
  const { slots, requests, request, events, first } = await waiting()
  await t.rejects(requests.generate(request).next(), { code: 'INVALID_REQUEST' })
  await t.rejects(requests.generate({ ...request, rid: 'b' }).next(), { code: 'QUEUE_FULL' })
  t.equal(requests.waiting, 1, 'a refused request ends no other')
  t.ok(requests.abort('a'))
  t.match(await first, { done: false, value: { finish: { type: 'abort' }, promptTokens: 1 } })
  t.equal((await events.next()).done, true)
  t.equal(slots.held, 0)
})
