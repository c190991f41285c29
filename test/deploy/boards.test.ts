import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { toBoard } from '../../scripts/boards/board.ts'
import { BOARDS } from '../../scripts/boards/boards.ts'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import { boardQueries, faults, read, rules, selectors } from '../helpers/load/promql.ts'
import type { Query } from '../helpers/load/promql.ts'

/** Metrics with the labels and values of their samples, from the text of /metrics. */
class Scrape {
  readonly names = new Set<string>()
  readonly labels = new Map<string, Map<string, Set<string>>>()

  add (text: string): void {
    for (const [, name, type] of text.matchAll(/^# TYPE (\S+) (\S+)$/gm)) {
      this.names.add(name!)
      if (type === 'histogram') { for (const end of ['bucket', 'sum', 'count']) this.names.add(`${name}_${end}`) }
    }
    for (const [, name, list = ''] of text.matchAll(/^([\w:]+)(?:\{(.*)\})? \S+$/gm)) {
      const labels = this.labels.get(name!) ?? new Map<string, Set<string>>()
      this.labels.set(name!, labels)
      for (const [, label, value] of list.matchAll(/(\w+)="([^"]*)"/g)) {
        labels.set(label!, (labels.get(label!) ?? new Set()).add(value!))
      }
    }
  }
}

/** Metrics of refit that no board shows, and why. A new metric belongs on a board or here. */
const NOT_SHOWN: Readonly<Record<string, string>> = {
  'refit:adapter_load_bytes_total': 'adapters are small',
  'refit:gateway_weights_changed_total': 'the same as the updates by outcome',
  'refit:gateway_worker_ready': 'the same as the engines by state',
  'refit:kept_samples': 'their memory is what has a limit',
  'refit:kept_tensor_names': 'their bytes are shown',
  'refit:request_time_per_output_token_seconds': 'for trainers; the time from one token to the next is shown',
  'refit:tensor_shares_released_total': 'open files are what leaks',
  'refit:truth_clipped_tokens_total': 'for sums over versions; the values of the newest version are shown',
  'refit:truth_difference_sum_total': 'the same',
  'refit:truth_kl_sum_total': 'the same',
  'refit:truth_tokens_total': 'the same',
  'refit:weight_epoch': 'versions are shown',
  'refit:weight_groups_joined_total': 'those that failed are shown'
}
/** Labels that Prometheus adds. */
const ADDED = new Set(['instance', 'job'])
const QUERIES: Query[] = [
  ...Object.keys(BOARDS).flatMap(boardQueries),
  ...rules().map(({ record, alert, expr }) => ({ from: `rules: ${record ?? alert}`, expression: expr }))
]

t.test('the boards are those that npm run boards writes', t => {
  for (const [name, board] of Object.entries(BOARDS)) {
    t.strictSame(JSON.parse(read(`deploy/grafana/${name}.json`)), JSON.parse(JSON.stringify(toBoard(board))), name)
  }
  t.end()
})

t.test('panels of a board do not overlap and have names and queries of their own', t => {
  for (const name of Object.keys(BOARDS)) {
    const { panels } = JSON.parse(read(`deploy/grafana/${name}.json`)) as {
      panels: { id: number, type: string, title: string, gridPos: Record<'x' | 'y' | 'w' | 'h', number> }[]
    }
    const taken = new Set<string>()
    for (const { title, gridPos: { x, y, w, h } } of panels) {
      for (let i = 0; i < w * h; i++) {
        const cell = `${x + i % w},${y + Math.floor(i / w)}`
        t.notOk(taken.has(cell) || x + w > 24, `${name}: ${title} at ${cell}`)
        taken.add(cell)
      }
    }
    t.equal(new Set(panels.map(({ id }) => id)).size, panels.length)
    t.equal(new Set(panels.map(({ title }) => title)).size, panels.length)
  }
  t.end()
})

t.test('the checker finds what is no PromQL', t => {
  t.strictSame(faults('sum by (a) (rate(x{b="c"}[5m]))'), [])
  for (const wrong of ['sum by (a', 'rate(x[5m)', 'x{b=}', 'x +']) t.not(faults(wrong).length, 0, wrong)
  t.match(selectors('rate(x{b=~"c", d!="e"}[5m]) / y'), [
    { metric: 'x', labels: [{ name: 'b', operator: '=~', value: 'c' }, { name: 'd', operator: '!=', value: 'e' }] },
    { metric: 'y', labels: [] }
  ])
  t.end()
})

t.test('every query is PromQL', t => {
  t.ok(QUERIES.length > 60)
  for (const { from, expression } of QUERIES) t.strictSame(faults(expression), [], from)
  t.end()
})

/**
 * A gateway of two servers with adapters, after everything that makes metrics: requests, updates, a refusal. `joined`:
 * what a server with --dp reports of its engines.
 */
async function scrapeAll (t: Test): Promise<{ scrape: Scrape, joined: Scrape }> {
  const folder = modelFolder(t)
  const engines = [
    await engineServer(t, folder, { enableLora: true, shadowWeights: true }),
    await engineServer(t, folder, { enableLora: true })
  ]
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  for (const { url } of engines) await gateway.until(url, 'ready')
  t.equal((await gateway.post('/generate', ask('1+2=', {}, { n: 2 }))).status, 200)
  const update = { model_path: join(folder, 'adder'), weight_version: 'step-1' }
  t.equal((await gateway.post('/update_weights_from_disk', update)).status, 200)
  t.not((await gateway.post('/update_weights_from_disk', { model_path: '/none' })).status, 200)
  const scrape = new Scrape()
  scrape.add((await gateway.get('/metrics')).body)
  for (const { url } of engines) scrape.add(await (await fetch(`${url}/metrics`)).text())
  const joined = new Scrape()
  joined.add((await gateway.get('/engine_metrics')).body)
  return { scrape, joined }
}

t.test('every metric that a board, a recording rule or an alert reads is in /metrics of a real server', async t => {
  const { scrape, joined } = await scrapeAll(t)
  const recorded = new Set(rules().flatMap(({ record }) => record ?? []))
  for (const { from, expression } of QUERIES) {
    for (const { metric, labels } of selectors(expression)) {
      if (metric === 'up' || recorded.has(metric)) continue
      t.ok(scrape.names.has(metric), `${from}: ${metric}`)
      // Metrics of events that have not happened have no sample yet.
      const known = scrape.labels.get(metric)
      if (known === undefined) continue
      for (const { name, operator, value } of labels.filter(({ name }) => !ADDED.has(name))) {
        const values = known.get(name)
        t.ok(values, `${from}: ${metric} has a label ${name}`)
        const wanted = operator === '=' ? [value] : operator === '=~' ? value.split('|') : []
        for (const one of wanted) t.ok(values?.has(one), `${from}: ${metric} has ${name}="${one}"`)
      }
    }
  }
  const read = new Set(QUERIES.flatMap(({ expression }) => selectors(expression).map(({ metric }) => metric)))
  for (
    const name of [...scrape.names].filter(name => name.startsWith('refit:') && !/_(bucket|sum|count)$/.test(name))
  ) {
    const isShown = ['', '_bucket', '_sum'].some(end => read.has(`${name}${end}`))
    t.not(isShown, name in NOT_SHOWN, `${name} is either on a board or not shown for a reason`)
    t.ok(name.startsWith('refit:gateway_') || joined.names.has(name), `/engine_metrics has ${name}`)
  }
  for (const [name, labels] of joined.labels) t.ok(labels.has('worker_addr'), `${name} has the address of its engine`)
  const labelsOf = (expression: string): string[] =>
    [...expression.matchAll(/\bby \(([^)]*)\)/g)].flatMap(([, list]) => list!.split(/\s*,\s*/))
  const all = new Set([...scrape.labels.values()].flatMap(labels => [...labels.keys()]))
  // A load of weights into an engine that missed an update has not happened here.
  for (const known of [...ADDED, 'le', 'from', 'worker']) all.add(known)
  for (const { from, expression } of QUERIES) {
    for (const label of labelsOf(expression)) t.ok(all.has(label), `${from}: there is a label ${label}`)
  }
})
