import { setTimeout as sleep } from 'node:timers/promises'
import t from 'tap'
import { Feed } from '../../src/ui/feed.ts'
import type { FeedReader } from '../../src/ui/feed-reader.ts'
import { History } from '../../src/ui/history.ts'
import { LATENCY_EDGES, LatencyCounts } from '../../src/http/latency-counts.ts'
import { until } from '../helpers/route-app.ts'

/** A source that counts what it makes. */
function counter (filler = '') {
  const made = { hello: 0, tick: 0 }
  return {
    made,
    hello: () => ({ hello: ++made.hello, seen: made.tick, filler }),
    tick: () => ({ tick: ++made.tick, filler })
  }
}

/** The frames that a reader gets, as they come. */
function read (reader: FeedReader): any[] {
  const got: any[] = []
  reader.on('data', (chunk: Buffer) => {
    for (const frame of String(chunk).split('\n\n').filter(text => text !== '')) {
      got.push(JSON.parse(/^data: (.*)$/m.exec(frame)![1]!))
    }
  })
  return got
}

t.test('a tick is made once for all pages, and none without a page', async t => {
  const source = counter()
  const feed = new Feed(source, { tickMs: 5, slowTickMs: 5 })
  await sleep(30)
  t.equal(source.made.tick, 0)
  const readers = Array.from({ length: 50 }, () => feed.open())
  const got = readers.map(read)
  await until(() => got.every(list => list.length > 5))
  t.equal(source.made.hello, 1, 'pages that open together share their first frame')
  for (const list of got) {
    t.ok(list[0].hello > 0)
    t.same(list.slice(1, 6).map(({ tick }) => tick), [1, 2, 3, 4, 5])
  }
  for (const reader of readers) reader.destroy()
  await until(() => feed.pages === 0)
  const { tick } = source.made
  await sleep(30)
  t.equal(source.made.tick, tick, 'no page, no tick')
  feed.close()
})

t.test('a page that opens later begins with a first frame that is not older than the last tick', async t => {
  const source = counter()
  const feed = new Feed(source, { tickMs: 5 })
  read(feed.open())
  await until(() => source.made.tick > 3)
  const got = read(feed.open())
  await until(() => got.length > 2)
  t.ok(got[1].tick <= got[0].seen + 1, 'no tick is missing between them')
  feed.close()
})

t.test('a page that reads nothing loses frames, holds a bounded number of bytes, and begins anew', async t => {
  const source = counter('x'.repeat(20_000))
  const feed = new Feed(source, { tickMs: 1 })
  const slow = feed.open()
  // One read opens it; then nobody reads.
  slow.read(0)
  await until(() => slow.drops > 0)
  t.ok(slow.readableLength <= 64 * 1024 + 25_000, `${slow.readableLength} bytes wait`)
  const { tick } = source.made
  await until(() => source.made.tick > tick + 20)
  t.ok(slow.readableLength <= 64 * 1024 + 25_000, 'and no more later')
  const got = read(slow)
  await until(() => got.filter(({ hello }) => hello !== undefined).length >= 2)
  const anew = got.findLastIndex(({ hello }) => hello !== undefined)
  await until(() => got.length > anew + 1)
  t.ok(got[anew + 1].tick <= got[anew].seen + 1, 'after it nothing is missing')
  feed.close()
})

t.test('a source that fails ends the page, and a closed feed takes no page', async t => {
  const feed = new Feed({
    hello: async () => {
      throw new Error('no')
    },
    tick: () => ({})
  })
  const reader = feed.open()
  const error = await new Promise<Error>(resolve => {
    reader.once('error', resolve)
    reader.resume()
  })
  t.equal(error.message, 'no')
  feed.close()
  t.throws(() => feed.open(), { code: 'ENGINE_CLOSED' })
})

t.test('a frame that cannot be made ends the pages, and no more than them', async t => {
  const feed = new Feed({
    hello: () => ({}),
    tick: async () => {
      throw new Error('no')
    }
  }, { tickMs: 1 })
  const errors: string[] = []
  for (let i = 0; i < 3; i++) feed.open().on('error', ({ message }) => errors.push(message)).resume()
  await until(() => errors.length === 3)
  t.strictSame(errors, ['no', 'no', 'no'])
  await until(() => feed.pages === 0)
  feed.close()
})

t.test('there is a most of pages', async t => {
  const feed = new Feed(counter())
  for (let i = 0; i < 1000; i++) feed.open()
  t.throws(() => feed.open(), { code: 'PAGES_FULL' })
  feed.close()
})

t.test('the history is bounded', async t => {
  const history = new History(() => ({ tokensPerSecond: 0, running: 0, queued: 0, kv: 0 }))
  for (let i = 0; i < 700; i++) history.add({ tokensPerSecond: i, running: 1, queued: 2, kv: 0.5 })
  history.close()
  t.equal(history.rows.length, 600)
  t.match(history.rows[0], { 1: 100, 2: 1, 3: 2, 4: 0.5 })
})

t.test('latencies are counted in the bucket whose edge is the next above', async t => {
  const latencies = new LatencyCounts()
  for (const [ms, times] of [[0.1, 1], [0.25, 2], [1, 3], [1.01, 4], [1e9, 5]] as const) latencies.add(ms, times)
  const used = latencies.counts.flatMap((count, i) => count > 0 ? [[LATENCY_EDGES[i] ?? Infinity, count]] : [])
  t.same(used, [[0.25, 3], [1, 3], [1.26, 4], [Infinity, 5]])
})
