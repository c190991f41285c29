import fc from 'fast-check'
import t from 'tap'
import { choose, routingKey } from '../../src/gateway/balance.ts'

const engines = (seeds: number[], loads: number[] = []) => seeds.map((seed, i) => ({ seed, load: loads[i] ?? 0 }))
const seeds = fc.uniqueArray(fc.integer({ min: 0, max: 2 ** 32 - 1 }), { minLength: 2, maxLength: 12 })
const hash = fc.integer({ min: 0, max: 2 ** 32 - 1 })
const body = (value: object): Buffer => Buffer.from(JSON.stringify(value))

t.test('removing an engine moves only the keys of that engine', async t => {
  fc.assert(fc.property(seeds, fc.array(hash, { maxLength: 50 }), (list, keys) => {
    const all = engines(list)
    const left = all.slice(1)
    return keys.every(hash => {
      const home = choose(all, { hash, sticky: true })
      return home === all[0] || choose(left, { hash, sticky: true }) === home
    })
  }))
  t.pass()
})

t.test('keys spread evenly, and the order of the list changes no choice', async t => {
  const all = engines([11, 222, 3333, 44444].map(seed => Math.imul(seed, 2654435761) >>> 0))
  const counts = new Map<unknown, number>()
  for (let i = 0; i < 4000; i++) {
    const key = { hash: Math.imul(i + 1, 40503) >>> 0, sticky: false }
    const home = choose(all, key)
    counts.set(home, (counts.get(home) ?? 0) + 1)
    if (choose([...all].reverse(), key) !== home) t.fail('the order decided')
  }
  for (const count of counts.values()) t.ok(count > 800 && count < 1200, String(count))
})

t.test('a popular prefix gives its engine at most a quarter more than the mean load', async t => {
  fc.assert(fc.property(seeds, hash, fc.integer({ min: 1, max: 300 }), (list, key, requests) => {
    const all = engines(list)
    for (let i = 1; i <= requests; i++) {
      const one = choose(all, { hash: key, sticky: false })!
      one.load++
      if (one.load > Math.ceil(1.25 * i / all.length)) return false
    }
    return true
  }))
  const all = engines([1, 2], [5, 0])
  t.equal(choose(all, null), all[1], 'without a key it chooses the least busy engine')
  t.equal(choose([], null), undefined)
  t.equal(choose([], { hash: 1, sticky: false }), undefined)
})

t.test('requests with the same beginning of the prompt have the same key', async t => {
  const of = (value: object, headers = {}) => routingKey(headers, body(value))
  const long = Array.from({ length: 600 }, (_, i) => i)
  t.same(
    of({ input_ids: [...long, 7], sampling_params: { temperature: 1 } }),
    of({ rid: 'x', stream: true, input_ids: [...long, 8, 9], logprob_start_len: 3 })
  )
  t.not(of({ input_ids: [1, 2, 3] })!.hash, of({ input_ids: [1, 2, 4] })!.hash)
  for (
    const value of [{ text: 'a' }, { prompt: 'a' }, {
      messages: [{ role: 'user', content: [{ type: 'text', text: 'hi' }] }]
    }, { token_ids: [1] }]
  ) t.ok(of(value))
  t.equal(of({ sampling_params: { n: 1 } }), null)
  t.equal(routingKey({}, Buffer.alloc(0)), null)
  t.same(of({ text: 'a' }, { 'x-session-id': 's' }), of({ text: 'b' }, { 'x-smg-routing-key': 's' }))
  t.equal(of({ text: 'a' }, { 'x-session-id': 's' })!.sticky, true)
})
