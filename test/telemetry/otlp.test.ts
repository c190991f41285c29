import { once } from 'node:events'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { join } from 'node:path'
import { setTimeout as sleep } from 'node:timers/promises'
import t from 'tap'
import type { Test } from 'tap'
import { packageRoot } from '../../src/root.ts'
import { startTelemetry } from '../../src/telemetry/otlp.ts'
import type { TelemetryOptions } from '../../src/telemetry/telemetry.ts'
import { serveModel } from '../helpers/conformance/served-model.ts'
import { eventually } from '../helpers/eventually.ts'
import { gatewayTo } from '../helpers/gateway.ts'
import { metricsOf, otlpReceiver, protobufFields, spansOf } from '../helpers/load/otlp-receiver.ts'
import type { Received, ReceivedSpan } from '../helpers/load/otlp-receiver.ts'

const TRACE = '0af7651916cd43dd8448eb211c80319c'
const PARENT = 'b7ad6b7169203331'
const TRAINED = join(packageRoot, 'models/adder')

interface Traced {
  url: string
  post: (path: string, body: object, headers?: Record<string, string>) => Promise<{ status: number, body: any }>
  /** Ends the telemetry, and returns everything that the collector got. */
  end: () => Promise<Received[]>
}

function optionsTo (endpoint: string): TelemetryOptions {
  return { endpoint, protocol: 'http/json', traces: true, metrics: true, metricIntervalMs: 60_000 }
}

async function traced (t: Test, options: Partial<TelemetryOptions> = {}): Promise<Traced> {
  const collector = await otlpReceiver(t)
  const telemetry = await startTelemetry({ ...optionsTo(collector.url), ...options })
  const { url } = await serveModel(t, { telemetry, modelRoots: [join(packageRoot, 'models')] })
  return {
    url,
    post: async (path, body, headers = {}) => {
      const reply = await fetch(url + path, {
        method: 'POST',
        headers: { 'content-type': 'application/json', ...headers },
        body: JSON.stringify(body)
      })
      return { status: reply.status, body: await reply.json() }
    },
    end: async () => {
      await telemetry.close()
      return collector.received
    }
  }
}

const under = (spans: readonly ReceivedSpan[], { spanId }: ReceivedSpan): ReceivedSpan[] =>
  spans.filter(({ parentSpanId }) => parentSpanId === spanId).sort((a, b) => Number(a.start - b.start))
const named = (spans: readonly ReceivedSpan[], name: string): ReceivedSpan => {
  const span = spans.find(span => span.name === name)
  if (span === undefined) throw new Error(`no span ${name} among ${spans.map(({ name }) => name).join(', ')}`)
  return span
}

t.test("a request continues its caller's trace, with spans for queue, prefill and decode", async t => {
  const { url, post, end } = await traced(t)
  const before = BigInt(Date.now() - 1000) * 1_000_000n
  const text = '77+88='
  const { body } = await post('/generate', {
    text,
    sampling_params: { temperature: 0, max_new_tokens: 9, ignore_eos: true, n: 2 }
  }, { traceparent: `00-${TRACE}-${PARENT}-01` })
  await fetch(`${url}/health`)
  const received = await end()
  const after = BigInt(Date.now() + 1000) * 1_000_000n
  const spans = spansOf(received)
  const [root, ...others] = spans.filter(({ kind }) => kind === 2)
  t.strictSame(others, [], 'health checks have no span')
  t.match(root, {
    name: 'POST /generate',
    traceId: TRACE,
    parentSpanId: PARENT,
    error: false,
    attributes: {
      'http.request.method': 'POST',
      'http.route': '/generate',
      'http.response.status_code': 200,
      'refit.samples': 2,
      'gen_ai.usage.output_tokens': 18
    }
  })
  const samples = under(spans, root!)
  t.strictSame(samples.map(({ name }) => name), ['sample', 'sample'])
  for (const sample of samples) {
    t.match(sample.attributes, {
      'gen_ai.usage.input_tokens': body[0].meta_info.prompt_tokens,
      'gen_ai.usage.output_tokens': 9,
      'refit.weight_versions': ['default'],
      'gen_ai.response.finish_reasons': ['length']
    })
    const [queue, prefill, decode] = under(spans, sample)
    t.strictSame([queue?.name, prefill?.name, decode?.name], ['queue', 'prefill', 'decode'])
    t.ok(sample.start <= queue!.start && queue!.start <= queue!.end)
    t.equal(prefill!.start, queue!.end)
    t.equal(decode!.start, prefill!.end)
    t.ok(prefill!.start < prefill!.end && decode!.start < decode!.end && decode!.end <= sample.end)
    t.ok(root!.start <= sample.start && sample.end <= root!.end)
  }
  t.ok(before < root!.start && root!.end < after, 'times are those of the clock on the wall')
  t.ok(spans.every(({ traceId }) => traceId === TRACE))
  const sent = received.map(({ body }) => String(body)).join('')
  t.notOk(sent.includes(text) || sent.includes(JSON.stringify(body[0].text)), 'no prompt and no output is sent')
  t.match(sent, /"service\.name"[^}]*"refit"/)
})

t.test('an update has spans for its phases, with the times of its report', async t => {
  const { post, end } = await traced(t)
  const { status, body } = await post('/update_weights_from_disk', { model_path: TRAINED, weight_version: 'step-1' })
  t.equal(status, 200)
  const spans = spansOf(await end())
  const root = named(spans, 'POST /update_weights_from_disk')
  t.equal(root.parentSpanId, '')
  const [update] = under(spans, root)
  t.match(update, {
    name: 'weight update',
    attributes: { 'refit.source': body.report.source, 'refit.tensors': body.report.tensors, 'refit.bytes': Number }
  })
  const phases = under(spans, update!)
  t.strictSame(phases.map(({ name }) => name), ['announce', 'plan', 'gate', 'write', 'verify', 'commit'])
  t.equal(phases[0]!.start, update!.start)
  t.equal(phases.at(-1)!.end, update!.end)
  phases.slice(1).forEach((phase, i) =>
    t.equal(phase.start, phases[i]!.end, `${phase.name} begins where the last ends`)
  )
  for (const name of ['plan', 'gate', 'write', 'verify']) {
    const { start, end } = named(phases, name)
    t.ok(Math.abs(Number(end - start) / 1e6 - body.report.ms[name]) < 0.01, name)
  }
  t.ok(root.start <= update!.start && update!.end <= root.end)
})

t.test('updates that wait for each other, and refused ones, belong to their own requests', async t => {
  const { post, end } = await traced(t)
  const ids = ['1', '2', '3', '4'].map(digit => digit.repeat(32))
  const replies = await Promise.all(ids.map(async (id, i) =>
    await post('/update_weights_from_disk', {
      model_path: i === 3 ? join(packageRoot, 'models/none') : TRAINED,
      weight_version: `step-${i}`
    }, { traceparent: `00-${id}-${PARENT}-01` })
  ))
  t.strictSame(replies.map(({ status }) => status), [200, 200, 200, 400])
  const spans = spansOf(await end())
  for (const [i, id] of ids.entries()) {
    const updates = spans.filter(({ traceId, name }) => traceId === id && name === 'weight update')
    t.equal(updates.length, 1, id)
    t.equal(updates[0]!.error, i === 3)
  }
})

t.test('a caller that does not sample its trace gets no spans', async t => {
  const { post, end } = await traced(t)
  const { status } = await post('/generate', { text: '1+2=', sampling_params: { max_new_tokens: 2 } }, {
    traceparent: `00-${TRACE}-${PARENT}-00`
  })
  t.equal(status, 200)
  t.strictSame(spansOf(await end()), [])
})

t.test('the metrics are those of /metrics', async t => {
  const { url, post, end } = await traced(t)
  await post('/generate', { text: '1+2=', sampling_params: { max_new_tokens: 8, ignore_eos: true, n: 3 } })
  await post('/update_weights_from_disk', { model_path: TRAINED, weight_version: 'step-41' })
  const text = await (await fetch(`${url}/metrics`)).text()
  const shown = (name: string): number => Number(new RegExp(`^refit:${name}(?:\\{.*\\})? (\\S+)$`, 'm').exec(text)?.[1])
  const metrics = metricsOf(await end())
  t.equal(shown('generation_tokens_total'), 24)
  t.match(metrics['refit.generation_tokens_total'].sum, {
    isMonotonic: true,
    aggregationTemporality: 2,
    dataPoints: [{ asDouble: 24, attributes: [{ key: 'model_name' }] }]
  })
  t.match(metrics['refit.weight_version'].gauge, { dataPoints: [{ asDouble: 41 }] })
  const [first] = metrics['refit.time_to_first_token_seconds'].histogram.dataPoints
  t.equal(first.count, 3)
  t.equal(first.bucketCounts.reduce((sum: number, count: number) => sum + count, 0), 3)
  t.equal(first.bucketCounts.length, first.explicitBounds.length + 1)
  t.equal(first.sum, shown('time_to_first_token_seconds_sum'))
  t.equal(metrics['refit.time_to_first_token_seconds'].unit, 's')
  const phases = metrics['refit.weight_update_seconds'].histogram.dataPoints
  t.ok(phases.length >= 5, 'one series for each phase')
})

t.test('traces or metrics alone can be sent, and protobuf is the default form', async t => {
  const { post, end } = await traced(t, { protocol: 'http/protobuf', metrics: false })
  await post('/generate', { text: '1+2=', sampling_params: { max_new_tokens: 2 } }, {
    traceparent: `00-${TRACE}-${PARENT}-01`
  })
  const received = await end()
  t.strictSame([...new Set(received.map(({ path, type }) => `${path} ${type}`))], ['/v1/traces application/x-protobuf'])
  const inside = (bytes: Buffer, field: number): Buffer[] =>
    protobufFields(bytes).filter(entry => entry.field === field).map(({ value }) => value as Buffer)
  // ExportTraceServiceRequest: resource_spans 1, scope_spans 2, spans 2; trace_id 1, parent_span_id 4, name 5.
  const spans = received.flatMap(({ body }) => inside(body, 1)).flatMap(part => inside(part, 2)).flatMap(part =>
    inside(part, 2)
  )
  const root = spans.find(span => String(inside(span, 5)[0]) === 'POST /generate')
  t.equal(inside(root!, 1)[0]!.toString('hex'), TRACE)
  t.equal(inside(root!, 4)[0]!.toString('hex'), PARENT)
  t.equal(spans.length, 5)
})

t.test('a collector that is not there costs no request, and does not hold up the end', async t => {
  const { post, end } = await traced(t, { endpoint: 'http://127.0.0.1:9' })
  const { status } = await post('/generate', { text: '1+2=', sampling_params: { max_new_tokens: 2 } })
  t.equal(status, 200)
  t.strictSame(await end(), [])
})

t.test('the first failure in a row is logged, and that the collector is there again', async t => {
  let status = 400
  const collector = createServer((request, reply) => {
    request.resume().on('end', () => reply.writeHead(status).end())
  })
  collector.listen(0, '127.0.0.1')
  await once(collector, 'listening')
  t.teardown(() => collector.close())
  const lines: string[] = []
  const add = (line: string): void => {
    lines.push(line)
  }
  const endpoint = `http://127.0.0.1:${(collector.address() as AddressInfo).port}`
  const telemetry = await startTelemetry({ ...optionsTo(endpoint), traces: false, metricIntervalMs: 20 }, {
    log: { info: add, warn: add }
  })
  await eventually(async () => await sleep(20, lines.length), length => length > 0)
  await sleep(200)
  status = 200
  await eventually(async () => await sleep(20, lines.length), length => length > 1)
  await telemetry.close()
  t.match(lines, [
    /metrics cannot be sent to the collector, and are dropped: Bad Request/,
    /metrics reach the collector/
  ])
  t.equal(lines.length, 2)
})

t.test("a gateway's span is the parent of one for each engine that it calls, and that of the engine's own", async t => {
  const { url: endpoint, received } = await otlpReceiver(t)
  const options = optionsTo(endpoint)
  const all = await Promise.all([options, options].map(async one => await startTelemetry(one)))
  const models = join(packageRoot, 'models')
  const engines = await Promise.all(all.map(async one => await serveModel(t, { telemetry: one, modelRoots: [models] })))
  const urls = engines.map(({ url }) => url)
  const telemetry = await startTelemetry(options, { service: 'refit-gateway' })
  const gateway = await gatewayTo(t, urls, { telemetry })
  const from = (parent: string, flags = '01'): Record<string, string> => ({
    traceparent: `00-${TRACE}-${parent.repeat(16)}-${flags}`
  })
  const replies = [
    await gateway.post('/generate', { text: '1+2=', sampling_params: { max_new_tokens: 2 } }, from('1')),
    await gateway.post('/update_weights_from_disk', { model_path: TRAINED, weight_version: 'step-1' }, from('2')),
    await gateway.post('/update_weights_from_disk', { model_path: join(models, 'none') }, from('3')),
    await gateway.post('/generate', { text: '1+2=', sampling_params: { max_new_tokens: 2 } }, from('4', '00'))
  ]
  t.strictSame(replies.map(({ status }) => status), [200, 200, 400, 200])
  await gateway.get('/health')
  for (const one of [...all, telemetry]) await one.close()
  const spans = spansOf(received)
  const requests = spans.filter(({ kind, traceId }) => kind === 2 && traceId === TRACE)
  t.strictSame([requests.length, spans.filter(({ kind }) => kind === 3).length], [3 + 5, 5], 'as many as were sampled')
  const others = spans.filter(({ traceId }) => traceId !== TRACE)
  t.ok(others.every(({ name }) => name === 'POST /weights_checker'), 'the gateway compares engines, and polls silently')
  for (
    const [parent, name, called, status] of [
      ['1', 'POST /generate', 1, 200],
      ['2', 'POST /update_weights_from_disk', 2, 200],
      ['3', 'POST /update_weights_from_disk', 2, 400]
    ] as const
  ) {
    const [request, ...others] = requests.filter(({ parentSpanId }) => parentSpanId === parent.repeat(16))
    t.strictSame(others, [])
    t.match(request, { name, attributes: { 'http.response.status_code': status } })
    const toEngines = under(spans, request!)
    t.equal(toEngines.length, called, name)
    for (const call of toEngines) {
      const url = String(call.attributes['refit.engine'])
      t.ok(urls.includes(url))
      t.match(call, {
        name: `engine ${url}`,
        kind: 3,
        error: status === 400,
        attributes: { 'http.response.status_code': status, 'url.path': name.slice(5) }
      })
      const [own, ...more] = under(spans, call)
      t.strictSame(more, [])
      t.match(own, { name, kind: 2 })
      t.strictSame(under(spans, own!).map(({ name }) => name), [name === 'POST /generate' ? 'sample' : 'weight update'])
      t.ok(request!.start <= call.start && call.start <= own!.start && call.end <= request!.end)
    }
  }
  t.match(metricsOf(received)['refit.gateway_weight_updates_total'].sum, { isMonotonic: true })
  t.match(received.map(({ body }) => String(body)).join(''), /"service\.name"[^}]*"refit-gateway"/)
})

t.test('a call to an engine that ends without a reply is an error', async t => {
  const { url: endpoint, received } = await otlpReceiver(t)
  const telemetry = await startTelemetry({ ...optionsTo(endpoint), metrics: false })
  const gateway = await gatewayTo(t, [(await serveModel(t)).url], { telemetry, healthMs: 3_600_000 })
  const [worker] = gateway.app.gateway.fleet.list
  const long = { text: '1+2=', sampling_params: { max_new_tokens: 4000, ignore_eos: true } }
  const running = gateway.post('/generate', long, { traceparent: `00-${TRACE}-${PARENT}-01` })
  while (worker!.load === 0) await new Promise(resolve => setTimeout(resolve, 1))
  await worker!.connection.close()
  t.equal((await running).status, 502)
  await telemetry.close()
  const spans = spansOf(received)
  t.match(named(spans, `engine ${worker!.url}`), { error: true, attributes: { 'error.type': 'ENGINE_CLOSED' } })
  t.equal(spans.length, 2)
})
