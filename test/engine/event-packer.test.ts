import t from 'tap'
import { EventPacker } from '../../src/engine/event-packer.ts'
import { EventUnpacker } from '../../src/engine/event-unpacker.ts'
import { initialStats } from '../../src/engine/initial-stats.ts'
import type { TokenEvent } from '../../src/contract/rollout-engine.ts'

function token (token: number, fields: Partial<TokenEvent> = {}): TokenEvent {
  return {
    tokens: [token],
    logprobs: [],
    top: [],
    ids: [],
    input: null,
    weightVersion: 'one',
    promptTokens: 3,
    cachedTokens: 1,
    completionTokens: 1,
    retractions: 0,
    seed: 7n,
    finish: null,
    ...fields
  }
}

/** Packs the events of one step, and unpacks them as the main thread does. */
function pass (
  packer: EventPacker,
  unpackers: Map<number, EventUnpacker>,
  events: [number, TokenEvent][]
): TokenEvent[] {
  for (const [id, event] of events) packer.event(id, event)
  const batch = packer.take(initialStats(64))
  return batch.ids.map((id, index) => {
    if (!unpackers.has(id)) unpackers.set(id, new EventUnpacker(true))
    return unpackers.get(id)!.event(batch, index, batch.details.find(({ at }) => at === index))
  })
}

t.test('a batch whose events have several labels gives each token its own', async t => {
  const packer = new EventPacker()
  const unpackers = new Map<number, EventUnpacker>()
  const labels = ['one', 'two', 'one', 'three', 'three']
  // Requests that are new, and requests that have been reported before.
  for (const round of [1, 2]) {
    const events = labels.map((weightVersion, id): [number, TokenEvent] => [id, token(id, { weightVersion })])
    t.same(pass(packer, unpackers, events).map(event => event.weightVersion), labels, `round ${round}`)
  }
  const later = pass(packer, unpackers, [[1, token(1, { weightVersion: 'four' })], [0, token(0)]])
  t.same(later.map(event => event.weightVersion), ['four', 'one'], 'a batch does not remember the label before')
})

t.test('an event arrives as it was packed, with tokens, logprobs, retractions, times and its end', async t => {
  const packer = new EventPacker()
  const unpackers = new Map<number, EventUnpacker>()
  const step = (at: number): [number, TokenEvent][] => [
    [1, token(10 + at, { logprobs: [[-0.5, 10 + at]], top: [[[-0.25, 4]]], ids: [[[-2, 5]]], completionTokens: at })],
    [
      2,
      token(20 + at, {
        logprobs: [[-1, 20 + at]],
        top: [[]],
        ids: [[]],
        completionTokens: at,
        retractions: at - 1,
        ...at === 1 ? { times: { queueMs: 1, prefillMs: 2 } } : {},
        ...at === 3 ? { finish: { type: 'length' as const, length: 3 } } : {}
      })
    ]
  ]
  for (const at of [1, 2, 3]) {
    const events = step(at)
    t.same(pass(packer, unpackers, events), events.map(([, event]) => event))
  }
  // Its number is used again for another request: nothing of the first is left.
  unpackers.delete(2)
  const again = token(1, { logprobs: [[-3, 1]], top: [[]], ids: [[]], promptTokens: 9, cachedTokens: 4, seed: 8n })
  t.same(pass(packer, unpackers, [[2, again]]), [again])
})

t.test('an event without a token, and an error, count no token', async t => {
  const packer = new EventPacker()
  packer.error(5, 'ENGINE_TORN', 'torn')
  packer.event(6, token(0, { tokens: [], completionTokens: 0, finish: { type: 'abort', message: 'Aborted' } }))
  const batch = packer.take(initialStats(64))
  t.same(batch.errors, [{ id: 5, code: 'ENGINE_TORN', message: 'torn' }])
  const event = new EventUnpacker(true).event(batch, 0, batch.details[0])
  t.match(event, { tokens: [], logprobs: [], completionTokens: 0, finish: { type: 'abort', message: 'Aborted' } })
  t.match(packer.take(initialStats(64)), { ids: [], tokens: [], errors: [], details: [] })
})
