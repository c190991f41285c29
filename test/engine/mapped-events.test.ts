import t from 'tap'
import { MappedEvents } from '../../src/engine/mapped-events.ts'
import type { FinishReason } from '../../src/contract/rollout-engine.ts'

interface Event {
  n: number
  finish: FinishReason | null
}

const STOP: FinishReason = { type: 'stop', matched: 1 }

/** Counts to `last`, and notes whether it was read to its end or left. */
class Numbers implements AsyncIterable<number> {
  state = 'new'
  readonly #last: number

  constructor (last: number) {
    this.#last = last
  }

  async *[Symbol.asyncIterator] (): AsyncGenerator<number> {
    this.state = 'left'
    for (let n = 1; n <= this.#last; n++) yield await Promise.resolve(n)
    this.state = 'read'
  }
}

function mapped (
  source: Numbers,
  map: (n: number) => Event | null
): { events: MappedEvents<number, Event>, closed: () => number } {
  let closed = 0
  const close = (): void => {
    closed++
  }
  return { events: new MappedEvents({ open: () => source, map, close }), closed: () => closed }
}

async function all (events: AsyncIterable<Event>): Promise<number[]> {
  const found = []
  for await (const { n } of events) found.push(n)
  return found
}

t.test('events are mapped and left out, and the end of the source is the end', async t => {
  const source = new Numbers(7)
  const { events, closed } = mapped(source, n => n % 2 === 0 ? null : { n: 10 * n, finish: null })
  t.same(await all(events), [10, 30, 50, 70])
  t.equal(source.state, 'read')
  t.equal(closed(), 1)
  t.same(await events.next(), { done: true, value: undefined })
})

t.test('nothing begins before the first read', async t => {
  let opened = 0
  const events = new MappedEvents<number, Event>({
    open: () => {
      opened++
      return new Numbers(1)
    },
    map: n => ({ n, finish: null })
  })
  t.equal(opened, 0)
  await events.next()
  t.equal(opened, 1)
})

t.test('the first event with a finish is the last, and the source is left before it is given', async t => {
  const source = new Numbers(7)
  const { events, closed } = mapped(source, n => ({ n, finish: n === 3 ? STOP : null }))
  const found = []
  for await (const { n } of events) {
    found.push(n)
    t.equal(closed(), n === 3 ? 1 : 0)
  }
  t.same(found, [1, 2, 3])
  t.equal(source.state, 'left')
})

t.test('a reader that stops leaves the source', async t => {
  const source = new Numbers(7)
  const { events, closed } = mapped(source, n => ({ n, finish: null }))
  for await (const { n } of events) if (n === 2) break
  t.equal(source.state, 'left')
  t.equal(closed(), 1)
  t.same(await events.next(), { done: true, value: undefined })
})

t.test('errors of the source and of the map reach the reader once, and leave the source', async t => {
  const source = new Numbers(7)
  const { events, closed } = mapped(source, n => {
    if (n === 2) throw new Error('map')
    return { n, finish: null }
  })
  await events.next()
  await t.rejects(events.next(), { message: 'map' })
  t.equal(source.state, 'left')
  t.equal(closed(), 1)
  t.same(await events.next(), { done: true, value: undefined })

  async function* failing (): AsyncGenerator<number> {
    yield await Promise.resolve(1)
    throw new Error('source')
  }
  let ended = 0
  const failed = new MappedEvents<number, Event>({
    open: failing,
    map: n => ({ n, finish: null }),
    close: () => {
      ended++
    }
  })
  await failed.next()
  await t.rejects(failed.next(), { message: 'source' })
  t.equal(ended, 1)
})

t.test('a request that is opened after its reader has stopped is left at once', async t => {
  const source = new Numbers(7)
  let open = (): void => {}
  const opening = new Promise<void>(resolve => {
    open = resolve
  })
  let held = false
  const events = new MappedEvents<number, Event>({
    open: async () => {
      await opening
      held = true
      return source
    },
    map: n => ({ n, finish: null }),
    close: () => {
      held = false
    }
  })
  const first = events.next()
  await events.return()
  open()
  t.same(await first, { done: true, value: undefined })
  t.notOk(held, 'what the opening took is given back')
  t.equal(source.state, 'new')
})

t.test('a reader that stops while an event is awaited leaves the source, and the read ends', async t => {
  let give = (): void => {}
  let left = false
  const events = new MappedEvents<number, Event>({
    open: () => ({
      [Symbol.asyncIterator]: () => ({
        next: async () =>
          await new Promise<IteratorResult<number>>(resolve => {
            give = () => {
              resolve({ done: true, value: undefined })
            }
          }),
        return: async () => {
          left = true
          give()
          return await Promise.resolve({ done: true, value: undefined })
        }
      })
    }),
    map: n => ({ n, finish: null })
  })
  const read = events.next()
  await new Promise(setImmediate)
  await events.return()
  t.ok(left)
  t.same(await read, { done: true, value: undefined })
})

t.test('two reads at once open the request once', async t => {
  let opened = 0
  const events = new MappedEvents<number, Event>({
    open: async () => {
      opened++
      return await Promise.resolve(new Numbers(3))
    },
    map: n => ({ n, finish: null })
  })
  const found = await Promise.all([events.next(), events.next()])
  t.equal(opened, 1)
  t.same(found.map(({ value }) => (value as Event).n), [1, 2])
})
