import t from 'tap'
import { call, frames, routeApp, until } from '../../helpers/route-app.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'

t.test('stream events contain everything so far, and the last one is [DONE]', async t => {
  const { url } = await routeApp(t)
  const reply = await call(`${url}/generate`, {
    text: 'abcd',
    stream: true,
    return_logprob: true,
    sampling_params: { max_new_tokens: 4 }
  })
  t.equal(reply.status, 200)
  t.equal(reply.headers.get('content-type'), 'text/event-stream; charset=utf-8')
  const all = frames(reply.text)
  t.equal(all.at(-1), '[DONE]')
  const events = all.slice(0, -1)
  t.same(events.at(-1).output_ids, [97, 98, 99, 100])
  for (const [i, event] of events.entries()) {
    t.equal(event.text, 'abcd'.slice(0, event.output_ids.length))
    t.equal(event.meta_info.output_token_logprobs.length, event.output_ids.length)
    t.equal(event.meta_info.finish_reason === null, i < events.length - 1)
    t.notOk('index' in event)
  }
})

t.test('stream events of a batch contain the index', async t => {
  const { url } = await routeApp(t)
  const events = frames(
    (await call(`${url}/generate`, { text: ['ab', 'cd'], stream: true, sampling_params: { max_new_tokens: 2 } })).text
  )
    .slice(0, -1)
  const ends = events.filter(event => event.meta_info.finish_reason !== null)
  t.same(Object.fromEntries(ends.map(event => [event.index, event.text])), { 0: 'ab', 1: 'cd' })
})

t.test('stream_interval reduces the number of events', async t => {
  const { url } = await routeApp(t, { engine: new FakeEngine({ stepMs: 1 }) })
  const events = frames(
    (await call(`${url}/generate`, {
      input_ids: [5],
      stream: true,
      sampling_params: { max_new_tokens: 10, stream_interval: 4 }
    }))
      .text
  )
    .slice(0, -1)
  t.same(events.map(event => event.output_ids.length), [4, 8, 10])
})

t.test('a stream that is refused before its first token has an error status', async t => {
  const engine = new FakeEngine({ info: { maxRunningRequests: 1, maxQueuedRequests: 0 }, stepMs: 5 })
  const { url } = await routeApp(t, { engine })
  const pending = call(`${url}/generate`, { input_ids: [5], rid: 'first', sampling_params: { max_new_tokens: 500 } })
  await until(() => engine.live === 1)
  const reply = await call(`${url}/generate`, { input_ids: [5], stream: true })
  t.equal(reply.status, 503)
  t.equal(reply.headers.get('retry-after'), '1')
  t.equal(reply.json.error.code, 'QUEUE_FULL')
  await call(`${url}/abort_request`, { rid: 'first' })
  t.equal((await pending).json.meta_info.finish_reason.type, 'abort')
})

t.test('a stream that fails later sends an error event and ends', async t => {
  const engine = new FakeEngine({ stepMs: 2 })
  const { url } = await routeApp(t, { engine })
  const pending = call(`${url}/generate`, { input_ids: [5], stream: true, sampling_params: { max_new_tokens: 500 } })
  await until(() => engine.stats.generationTokens > 3)
  engine.weights = { state: 'torn', tensors: ['x'], reason: 'a read failed' }
  const reply = await pending
  t.equal(reply.status, 200)
  const all = frames(reply.text)
  t.equal(all.at(-1), '[DONE]')
  t.match(all.at(-2), { error: { message: 'a read failed', code: 503, refit_code: 'ENGINE_TORN', retryable: true } })
})
