import { connect } from 'node:net'
import { once } from 'node:events'
import t from 'tap'
import { call, frames, routeApp, until } from '../../helpers/route-app.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'

async function raw (url: string, body: object) {
  const { hostname, port } = new URL(url)
  const socket = connect(Number(port), hostname.replace(/^\[|\]$/g, ''))
  await once(socket, 'connect')
  const text = JSON.stringify(body)
  socket.write(
    `POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: ${
      Buffer.byteLength(text)
    }\r\n\r\n${text}`
  )
  return socket
}

for (const stream of [false, true]) {
  t.test(`a client that disconnects aborts every sample of its ${stream ? 'stream' : 'request'}`, async t => {
    const engine = new FakeEngine({ stepMs: 2 })
    const { url } = await routeApp(t, { engine })
    const socket = await raw(url, { input_ids: [[5], [6]], stream, sampling_params: { n: 2, max_new_tokens: 500 } })
    await until(() => engine.stats.generationTokens > 8)
    t.equal(engine.live, 4)
    socket.destroy()
    await until(() => engine.live === 0)
    t.ok(engine.stats.generationTokens < 2000)
    t.equal(
      (await call(`${url}/generate`, { input_ids: [5], sampling_params: { max_new_tokens: 1 } })).status,
      200,
      'and generation continues'
    )
  })
}

t.test('a client that disconnects while generation is paused frees its request', async t => {
  const engine = new FakeEngine()
  const { url } = await routeApp(t, { engine })
  await engine.pause('in_place')
  const sockets = [await raw(url, { input_ids: [5], stream: true }), await raw(url, { input_ids: [5] })]
  await until(() => engine.live === 2)
  for (const socket of sockets) socket.destroy()
  await until(() => engine.live === 0)
  t.pass()
})

t.test('a stream during a pause sends its headers before its first token', async t => {
  const engine = new FakeEngine()
  const { url } = await routeApp(t, { engine })
  await engine.pause('in_place')
  const reply = await fetch(`${url}/generate`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ input_ids: [5], stream: true, sampling_params: { max_new_tokens: 2 } })
  })
  t.equal(reply.status, 200)
  t.equal(engine.stats.generationTokens, 0)
  await engine.resume()
  t.same(frames(await reply.text()).at(-2).output_ids, [5, 5])
})

t.test('a reader that does not read blocks no generation, holds no memory, and gets the last event whole', async t => {
  const tokens = 3000
  const engine = new FakeEngine({ info: { contextLength: 2 * tokens } })
  const { url } = await routeApp(t, { engine })
  // Cumulative events of 3000 tokens with logprobs would have about 70 MB if no events were merged.
  const socket = await raw(url, {
    input_ids: [5, 6],
    stream: true,
    return_logprob: true,
    sampling_params: { max_new_tokens: tokens }
  })
  socket.pause()
  await until(() => engine.stats.generationTokens === tokens && engine.live === 0)
  let text = ''
  socket.on('data', chunk => {
    text += String(chunk)
  })
  socket.resume()
  await until(() => text.endsWith('0\r\n\r\n'))
  socket.destroy()
  t.ok(text.length < 35e6, `merged to ${text.length} bytes`)
  // Removes the chunked coding.
  const events = text.replace(/\r\n[0-9a-f]+\r\n/g, '').split('data: ')
  t.match(events.at(-1), '[DONE]')
  const last = JSON.parse(events.at(-2)!.trim())
  t.equal(last.output_ids.length, tokens)
  t.equal(last.meta_info.output_token_logprobs.length, tokens)
  t.equal(last.meta_info.finish_reason.type, 'length')
})

t.test('a connection serves many requests', async t => {
  const { url } = await routeApp(t)
  const { hostname, port } = new URL(url)
  const socket = connect(Number(port), hostname.replace(/^\[|\]$/g, ''))
  let text = ''
  socket.on('data', chunk => {
    text += String(chunk)
  })
  const body = JSON.stringify({ input_ids: [5], sampling_params: { max_new_tokens: 1 } })
  const count = 20
  for (let i = 0; i < count; i++) {
    socket.write(
      'POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n' +
        `content-length: ${body.length}\r\n\r\n${body}`
    )
    await until(() => text.split('HTTP/1.1 200').length === i + 2)
  }
  socket.destroy()
  t.equal(text.split('"output_ids":[5]').length, count + 1)
})

t.test('many simultaneous streams do not mix', async t => {
  const { url, engine } = await routeApp(t)
  const replies = await Promise.all(Array.from({ length: 60 }, async (_, i) =>
    await call(`${url}/generate`, {
      input_ids: [i + 10, i + 100],
      stream: i % 2 === 0,
      sampling_params: { max_new_tokens: 6 }
    })))
  for (const [i, reply] of replies.entries()) {
    const output = i % 2 === 0 ? frames(reply.text).at(-2) : reply.json
    t.same(output.output_ids, [i + 10, i + 100, i + 10, i + 100, i + 10, i + 100])
  }
  t.equal(engine.live, 0)
})
