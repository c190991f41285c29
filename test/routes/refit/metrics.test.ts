import t from 'tap'
import { chooseMetricNames } from '../../../src/http/metric-families.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, routeApp } from '../../helpers/route-app.ts'

/** Values by series, and types by family. */
async function scrape (url: string): Promise<{ values: Map<string, number>, types: Map<string, string> }> {
  const { text } = await call(`${url}/metrics`)
  const values = new Map<string, number>()
  const types = new Map<string, string>()
  for (const line of text.split('\n')) {
    const [, family, type] = /^# TYPE (\S+) (\S+)$/.exec(line) ?? []
    if (family !== undefined) {
      if (types.has(family)) throw new Error(`${family} comes twice`)
      types.set(family, type!)
    } else if (line !== '' && !line.startsWith('#')) {
      const at = line.lastIndexOf(' ')
      values.set(line.slice(0, at), Number(line.slice(at + 1)))
    }
  }
  return { values, types }
}

const vllm = (name: string, labels = ''): string => `vllm:${name}{${labels}model_name="fake",engine="0"}`
const tokenizer = (name: string, labels = ''): string =>
  `sglang:${name}{${labels}model_name="fake",engine_type="unified"}`
/** SGLang's families that tell requests which stream from the others. */
const split = (name: string, isStreaming = false): string => tokenizer(name, `is_streaming="${isStreaming}",`)
const scheduler = (name: string): string =>
  `sglang:${name}{tp_rank="0",pp_rank="0",moe_ep_rank="0",model_name="fake",engine_type="unified"}`

t.test("vLLM's and SGLang's names have refit's values", async t => {
  const { url } = await routeApp(t, { engine: new FakeEngine({ info: { kvTokens: 4100, pageSize: 16 } }) })
  for (const tokens of [4, 7]) {
    await call(`${url}/generate`, { input_ids: [5, 6], sampling_params: { max_new_tokens: tokens } })
  }
  const { values, types } = await scrape(url)
  for (
    const [series, value] of Object.entries({
      [vllm('prompt_tokens_total')]: 4,
      [vllm('generation_tokens_total')]: 11,
      [vllm('request_success_total', 'finished_reason="length",')]: 2,
      [vllm('request_success_total', 'finished_reason="abort",')]: 0,
      [vllm('prefix_cache_queries_total')]: 4,
      [vllm('num_requests_running')]: 0,
      [vllm('num_requests_waiting_by_reason', 'reason="capacity",')]: 0,
      [vllm('kv_cache_usage_perc')]: 10 / 4100,
      [vllm('cache_config_info', 'kv_cache_size_tokens="4100",block_size="16",num_gpu_blocks="256",')]: 1,
      [vllm('time_to_first_token_seconds_count')]: 2,
      [vllm('inter_token_latency_seconds_count')]: 9,
      [vllm('request_time_per_output_token_seconds_count')]: 2,
      [vllm('e2e_request_latency_seconds_bucket', 'le="+Inf",')]: 2,
      [vllm('request_queue_time_seconds_sum')]: 0.5,
      [scheduler('num_running_reqs')]: 0,
      [scheduler('token_usage')]: 10 / 4100,
      [scheduler('num_used_tokens')]: 10,
      [split('prompt_tokens_total')]: 4,
      [split('num_requests_total')]: 2,
      [tokenizer('num_aborted_requests_total')]: 0,
      [split('time_per_output_token_seconds_count')]: 2,
      [split('e2e_request_latency_seconds_count')]: 2
    })
  ) t.equal(values.get(series), value, series)
  t.equal(types.get('vllm:kv_cache_usage_perc'), 'gauge')
  t.equal(types.get('vllm:num_preemptions_total'), 'counter')
  t.equal(types.get('sglang:time_to_first_token_seconds'), 'histogram')
})

t.test('each name has the number that it is documented with', async t => {
  // Numbers that differ from each other, as a real engine's do.
  const engine = new FakeEngine({ info: { kvTokens: 1000 } })
  const stats = {
    running: 11,
    queued: 12,
    usedTokens: 130,
    cachedTokens: 14,
    totalTokens: 1000,
    promptTokens: 1500,
    generationTokens: 1600,
    prefixHitTokens: 300,
    retractions: 18,
    tokensPerSecond: 19
  }
  const before = engine.stats
  Object.defineProperty(engine, 'stats', { get: () => ({ ...before, ...stats }) })
  const { values } = await scrape((await routeApp(t, { engine })).url)
  const refit = (name: string): string => `refit:${name}{model_name="fake"}`
  const same: [number, string[]][] = [
    [11, [refit('num_requests_running'), vllm('num_requests_running'), scheduler('num_running_reqs')]],
    [12, [refit('num_requests_waiting'), vllm('num_requests_waiting'), scheduler('num_queue_reqs')]],
    [0.13, [refit('kv_cache_usage_perc'), vllm('kv_cache_usage_perc'), vllm('gpu_cache_usage_perc')]],
    [0.13, [scheduler('token_usage')]],
    [130, [scheduler('num_used_tokens')]],
    [1500, [refit('prompt_tokens_total'), vllm('prompt_tokens_total'), vllm('prefix_cache_queries_total')]],
    [1600, [refit('generation_tokens_total'), vllm('generation_tokens_total')]],
    [300, [refit('prefix_cache_hits_total'), vllm('prefix_cache_hits_total'), vllm('prompt_tokens_cached_total')]],
    [300, ['sglang:cached_tokens_total{cache_source="device",model_name="fake",engine_type="unified"}']],
    [0.2, [scheduler('cache_hit_rate')]],
    [18, [refit('num_preemptions_total'), vllm('num_preemptions_total'), scheduler('num_retracted_requests_total')]],
    [19, [scheduler('gen_throughput')]]
  ]
  for (const [value, series] of same) for (const name of series) t.equal(values.get(name), value, name)
})

t.test("SGLang's names tell requests that stream from the others", async t => {
  const { url } = await routeApp(t)
  const body = { input_ids: [5, 6], sampling_params: { max_new_tokens: 4 } }
  const counts = async (isStreaming: boolean): Promise<(number | undefined)[]> => {
    const { values } = await scrape(url)
    return [
      'num_requests_total',
      'time_to_first_token_seconds_count',
      'request_time_per_output_token_seconds_count',
      'e2e_request_latency_seconds_count',
      'prompt_tokens_total',
      'generation_tokens_total'
    ]
      .map(name => values.get(split(name, isStreaming)))
  }
  t.same([await counts(false), await counts(true)], [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
  await call(`${url}/generate`, { ...body, stream: true })
  t.same([await counts(false), await counts(true)], [[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 2, 4]])
  await call(`${url}/generate`, body)
  const chat = { messages: [{ role: 'user', content: 'x' }], input_ids: [5, 6, 7], max_tokens: 3 }
  const completion = { prompt: [5, 6, 7, 8], max_tokens: 2 }
  for (const stream of [true, false]) {
    for (const [path, body] of [['chat/completions', chat], ['completions', completion]] as const) {
      const { status, text } = await call(`${url}/v1/${path}`, { ...body, stream })
      t.equal(status, 200, text)
    }
  }
  t.same([await counts(false), await counts(true)], [[3, 3, 3, 3, 9, 9], [3, 3, 3, 3, 9, 9]])
  const { values } = await scrape(url)
  t.equal(values.get(vllm('generation_tokens_total')), 18, 'a name of vLLM has no such label')
})

t.test('counters and histograms never decrease, and aborted requests are counted', async t => {
  const { url, engine } = await routeApp(t)
  let before = await scrape(url)
  for (const abort of [false, true, false]) {
    engine.stepMs = abort ? 20 : 0
    const running = call(`${url}/generate`, { rid: 'one', input_ids: [5], sampling_params: { max_new_tokens: 20 } })
    if (abort) {
      while (engine.live === 0) await new Promise(resolve => setTimeout(resolve, 5))
      await call(`${url}/abort_request`, { rid: 'one' })
    }
    await running
    const after = await scrape(url)
    for (const [series, value] of before.values) {
      const family = series.split('{', 1)[0]!
      const grows = /_(total|bucket|count)$/.test(family) && !/process|nodejs/.test(family)
      if (grows && !(after.values.get(series)! >= value)) t.fail(`${series} fell to ${after.values.get(series)}`)
    }
    t.ok(after.values.get(split('num_requests_total'))! > before.values.get(split('num_requests_total'))!)
    before = after
  }
  t.equal(before.values.get(split('num_requests_total')), 3)
  t.equal(before.values.get(tokenizer('num_aborted_requests_total')), 1)
})

t.test('every way to end a request counts it once, under its reason', async t => {
  const { url, engine } = await routeApp(t)
  const ended = async (): Promise<Record<string, number | undefined>> => {
    const { values } = await scrape(url)
    const refit = (reason: string): number | undefined =>
      values.get(`refit:request_success_total{finished_reason="${reason}",model_name="fake"}`)
    const sumOf = (name: string): number => values.get(split(name))! + values.get(split(name, true))!
    return {
      stop: refit('stop'),
      length: refit('length'),
      abort: refit('abort'),
      vllmAborts: values.get(vllm('request_success_total', 'finished_reason="abort",')),
      aborts: values.get(tokenizer('num_aborted_requests_total')),
      all: sumOf('num_requests_total'),
      timed: sumOf('e2e_request_latency_seconds_count')
    }
  }
  const counts = (length: number, aborts: number): object => ({
    stop: 0,
    length,
    abort: aborts,
    vllmAborts: aborts,
    aborts,
    all: length + aborts,
    timed: length + aborts
  })
  const long = { input_ids: [5], sampling_params: { max_new_tokens: 500 } }
  const live = async (count: number): Promise<void> => {
    while (engine.live !== count) await new Promise(resolve => setTimeout(resolve, 5))
  }
  t.same(await ended(), counts(0, 0))
  engine.stepMs = 20
  // Twice by its id, in the middle.
  const one = call(`${url}/generate`, { rid: 'one', ...long })
  await live(1)
  await Promise.all(['one', 'one'].map(async rid => await call(`${url}/abort_request`, { rid })))
  await one
  t.same(await ended(), counts(0, 1))
  // All at once, among them a batch, and while they stream.
  const all = [
    call(`${url}/generate`, { ...long, input_ids: [[5], [6]] }),
    call(`${url}/generate`, { ...long, stream: true }),
    call(`${url}/generate`, { ...long, sampling_params: { max_new_tokens: 500, n: 2 } })
  ]
  await live(5)
  await call(`${url}/abort_request`, { abort_all: true })
  await Promise.all(all)
  t.same(await ended(), counts(0, 6))
  // Before their first token.
  await call(`${url}/pause_generation`, { mode: 'in_place' })
  const held = call(`${url}/generate`, { rid: 'held', ...long })
  await live(1)
  await call(`${url}/abort_request`, { rid: 'held' })
  await held
  await call(`${url}/continue_generation`, {})
  t.same(await ended(), counts(0, 7))
  // By a pause.
  const paused = call(`${url}/generate`, long)
  await live(1)
  await call(`${url}/pause_generation`, { mode: 'abort' })
  await paused
  await call(`${url}/continue_generation`, {})
  t.same(await ended(), counts(0, 8))
  engine.stepMs = 0
  await call(`${url}/generate`, { input_ids: [[5], [6]], sampling_params: { max_new_tokens: 3 } })
  t.same(await ended(), counts(2, 8))
})

t.test('requests that wait during a pause do not wait for capacity', async t => {
  class Waiting extends FakeEngine {
    override get stats (): FakeEngine['stats'] {
      return { ...super.stats, queued: 3 }
    }
  }
  const { url } = await routeApp(t, { engine: new Waiting() })
  const waiting = async (): Promise<(number | undefined)[]> => {
    const { values } = await scrape(url)
    return ['capacity', 'deferred'].map(reason =>
      values.get(vllm('num_requests_waiting_by_reason', `reason="${reason}",`))
    )
  }
  t.same(await waiting(), [3, 0])
  await call(`${url}/pause_generation`, {})
  t.same(await waiting(), [0, 3])
})

t.test('--metric-names chooses the names', async t => {
  const families = async (...metricNames: ('refit' | 'sglang' | 'vllm')[]): Promise<Set<string>> => {
    const { url } = await routeApp(t, { metricNames })
    const { types } = await scrape(url)
    return new Set([...types.keys()].map(name => name.split(/[:_]/, 1)[0]!))
  }
  t.same(await families(), new Set(['process', 'nodejs', 'refit', 'vllm', 'sglang']))
  t.same(await families('vllm'), new Set(['process', 'nodejs', 'vllm']))
  t.same(await families('sglang', 'refit'), new Set(['process', 'nodejs', 'refit', 'sglang']))
  t.throws(() => chooseMetricNames(['vllm', 'trt']), {
    code: 'CONFIG',
    message: '--metric-names: expected refit, vllm, sglang, got "trt"'
  })
})
