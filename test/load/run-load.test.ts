import type { ServerResponse } from 'node:http'
import t from 'tap'
import type { Test } from 'tap'
import { ServerConnection } from '../../src/client/server-connection.ts'
import { APIS } from '../../src/load/apis.ts'
import { arrivals, runLoad } from '../../src/load/run-load.ts'
import type { LoadPlan } from '../../src/load/run-load.ts'
import { summarise } from '../../src/load/summary.ts'
import type { LoadSummary } from '../../src/load/summary.ts'
import { LoadClock } from '../helpers/load/clock.ts'
import { PLAN } from '../helpers/load/plan.ts'
import { END, event, scriptedServer, sglangEvent } from '../helpers/load/scripted-server.ts'

// The server and the load share a clock that the server moves before it writes, so every measured time is known.

function planOf (t: Test, url: string, clock: LoadClock, more: Partial<LoadPlan> = {}): LoadPlan {
  const connection = new ServerConnection(url, {})
  t.teardown(async () => await connection.close())
  return { ...PLAN, connection, clock, ...more }
}

async function load (plan: LoadPlan): Promise<LoadSummary> {
  return summarise(plan, await runLoad(plan))
}

/** Writes after `ms`, and returns once the client has read its clock for each event. */
async function write (clock: LoadClock, reply: ServerResponse, ms: number, ...events: string[]): Promise<void> {
  clock.advance(ms)
  const seen = clock.reads(events.length)
  reply.write(events.join(''))
  await seen
}

t.test('times of one stream are measured exactly', async t => {
  const clock = new LoadClock()
  const url = await scriptedServer(t, async ({ reply }) => {
    reply.writeHead(200, { 'content-type': 'text/event-stream' })
    await write(clock, reply, 100, sglangEvent(1))
    await write(clock, reply, 10, sglangEvent(2))
    await write(clock, reply, 30, sglangEvent(5))
    clock.advance(7)
    reply.end(END)
  })
  const summary = await load(planOf(t, url, clock, { requests: 2 }))
  t.match(summary, {
    duration_s: 0.294,
    requests: { sent: 2, succeeded: 2, failed: 0 },
    tokens: { prompt: 14, cached: 4, output: 10 },
    time_to_first_token_ms: { count: 2, p50: 100, max: 100 },
    // 10 ms for the second token; 30 ms for three tokens are 10 ms each.
    inter_token_ms: { count: 8, p50: 10, p999: 10, max: 10 },
    gap_ms: { count: 4, mean: 20, p50: 10, p90: 30, p99: 30, max: 30 },
    time_per_output_token_ms: { count: 2, p50: 10, max: 10 },
    request_ms: { count: 2, p50: 147, max: 147 },
    in_flight: { mean: 1, max: 1 },
    weight_versions: { w1: 2 }
  })
  t.equal(summary.throughput.output_tokens_per_s, 10 / 0.294)
  t.equal(summary.throughput.total_tokens_per_s, 24 / 0.294)
  t.equal(summary.throughput.requests_per_s, 2 / 0.294)
})

t.test('each sample of a group has its own first token and gaps', async t => {
  const clock = new LoadClock()
  const url = await scriptedServer(t, async ({ reply, body }) => {
    t.equal(body.sampling_params.n, 2)
    reply.writeHead(200)
    await write(clock, reply, 50, sglangEvent(1, {}, 0), sglangEvent(1, {}, 1))
    await write(clock, reply, 20, sglangEvent(2, {}, 1))
    await write(clock, reply, 5, sglangEvent(2, { weight_version: 'w2' }, 0))
    reply.end(END)
  })
  const summary = await load(planOf(t, url, clock, { samples: 2 }))
  t.match(summary, {
    tokens: { output: 4 },
    time_to_first_token_ms: { count: 2, p50: 50, max: 50 },
    inter_token_ms: { count: 2, p50: 20, max: 25 },
    weight_versions: { w1: 1, w2: 1 }
  })
})

t.test('a closed loop keeps as many requests in flight as it should, and measures how many', async t => {
  const clock = new LoadClock()
  const replies: ServerResponse[] = []
  const end = async (reply: ServerResponse, ms: number): Promise<void> => {
    await write(clock, reply, ms, sglangEvent(1))
    const seen = clock.reads(2)
    reply.end(END)
    await seen
  }
  const url = await scriptedServer(t, async ({ reply }) => {
    reply.writeHead(200)
    replies.push(reply)
    if (replies.length < 2) return
    await end(replies[0]!, 100)
    await end(replies[1]!, 100)
  })
  const summary = await load(planOf(t, url, clock, { requests: 2, arrivals: { concurrency: 2 } }))
  t.match(summary, { in_flight: { mean: 1.5, max: 2 }, request_ms: { p50: 100, max: 200 }, duration_s: 0.2 })
})

t.test('an open loop counts waiting from when a request was due, not from when it was sent', async t => {
  const clock = new LoadClock()
  const times = arrivals(10, 1)
  const [, second, third] = [times.next().value, times.next().value, times.next().value]
  let asked = 0
  const url = await scriptedServer(t, async ({ reply }) => {
    reply.writeHead(200)
    asked++
    await write(clock, reply, 0, sglangEvent(1))
    const seen = clock.reads(2)
    reply.end(END)
    await seen
    // The load sleeps over the times of both other requests.
    if (asked === 1) clock.advance(5000)
  })
  const summary = await load(planOf(t, url, clock, { requests: 3, arrivals: { rate: 10 } }))
  t.match(summary, {
    client: { late_ms: { count: 3, p50: 5000 - third, max: 5000 - second } },
    time_to_first_token_ms: { p50: 5000 - third, max: 5000 - second }
  })
})

t.test('warm-up requests are sent and not counted', async t => {
  const clock = new LoadClock()
  let asked = 0
  const url = await scriptedServer(t, async ({ reply }) => {
    reply.writeHead(200)
    await write(clock, reply, asked++ < 3 ? 1000 : 10, sglangEvent(1))
    reply.end(END)
  })
  const summary = await load(planOf(t, url, clock, { requests: 2, warmup: 3 }))
  t.equal(asked, 5)
  t.match(summary, { requests: { sent: 2 }, time_to_first_token_ms: { count: 2, max: 10 } })
})

t.test('after --seconds no request begins, and those that run are finished', async t => {
  const clock = new LoadClock()
  const url = await scriptedServer(t, async ({ reply }) => {
    reply.writeHead(200)
    await write(clock, reply, 400, sglangEvent(1))
    reply.end(END)
  })
  const summary = await load(planOf(t, url, clock, { requests: null, seconds: 1 }))
  t.match(summary, { requests: { sent: 3, succeeded: 3 }, duration_s: 1.2 })
})

t.test("vLLM's choices are counted by their ids, and OpenAI's by their events and the usage at the end", async t => {
  const clock = new LoadClock()
  const url = await scriptedServer(t, async ({ reply, body }) => {
    reply.writeHead(200)
    const ids = body.return_token_ids === true
    const choice = (text: string, tokens: number[]) =>
      event({ choices: [{ index: 0, text, finish_reason: null, ...ids ? { token_ids: tokens } : {} }] })
    await write(clock, reply, 40, choice('a', [1]))
    await write(clock, reply, 30, choice('bcd', [2, 3, 4]))
    await write(clock, reply, 0, event({ choices: [], usage: { prompt_tokens: 7, completion_tokens: 4 } }))
    reply.end(END)
  })
  t.match(await load(planOf(t, url, clock, { api: APIS.vllm })), {
    tokens: { prompt: 7, output: 4 },
    inter_token_ms: { count: 3, p50: 10 },
    time_per_output_token_ms: { p50: 10 }
  })
  t.match(await load(planOf(t, url, clock, { api: APIS.openai })), {
    tokens: { prompt: 7, output: 4 },
    inter_token_ms: { count: 1, p50: 30 }
  })
})
