import type { Attributes, HrTime } from '@opentelemetry/api'
import { ValueType } from '@opentelemetry/api'
import type { Resource } from '@opentelemetry/resources'
import { AggregationTemporality, DataPointType } from '@opentelemetry/sdk-metrics'
import type { CollectionResult, DataPoint, Histogram, MetricData, MetricProducer } from '@opentelemetry/sdk-metrics'
import type { MetricObjectWithValues, MetricValue, Registry } from 'prom-client'
import { hrTime } from './times.ts'

type PromMetric = MetricObjectWithValues<MetricValue<string> & { metricName?: string }>

/**
 * The metrics of Prometheus registries for OpenTelemetry: the same numbers, so that both show the same. Names have a
 * point where Prometheus's have a colon (`refit.generation_tokens_total`).
 */
export class RegistryProducer implements MetricProducer {
  readonly #registries: Registry[] = []
  readonly #resource: Resource
  readonly #start = hrTime(performance.now())

  constructor (resource: Resource) {
    this.#resource = resource
  }

  add (registry: Registry): void {
    this.#registries.push(registry)
  }

  async collect (): Promise<CollectionResult> {
    const now = hrTime(performance.now())
    const lists = await Promise.all(this.#registries.map(async registry => await registry.getMetricsAsJSON()))
    const metrics = lists.flat().flatMap(metric => toData(metric as unknown as PromMetric, this.#start, now))
    const scope = { name: 'refit' }
    return { resourceMetrics: { resource: this.#resource, scopeMetrics: [{ scope, metrics }] }, errors: [] }
  }
}

function toData (metric: PromMetric, startTime: HrTime, endTime: HrTime): MetricData[] {
  const head = {
    descriptor: {
      name: metric.name.replaceAll(':', '.'),
      description: metric.help,
      unit: metric.name.endsWith('_seconds') ? 's' : metric.name.includes('_bytes') ? 'By' : '1',
      valueType: ValueType.DOUBLE
    },
    aggregationTemporality: AggregationTemporality.CUMULATIVE
  }
  const times = { startTime, endTime }
  const type = String(metric.type)
  if (type === 'histogram') {
    return [{ ...head, dataPointType: DataPointType.HISTOGRAM, dataPoints: histograms(metric, times) }]
  }
  // NaN stands for "no number", which a point cannot say.
  const values = metric.values.filter(({ value }) => Number.isFinite(value))
  const dataPoints = values.map(({ value, labels }): DataPoint<number> => ({
    ...times,
    attributes: labels as Attributes,
    value
  }))
  if (dataPoints.length === 0) return []
  return type === 'counter'
    ? [{ ...head, dataPointType: DataPointType.SUM, isMonotonic: true, dataPoints }]
    : type === 'gauge'
    ? [{ ...head, dataPointType: DataPointType.GAUGE, dataPoints }]
    : []
}

/** Prometheus's buckets are cumulative, and those of OpenTelemetry are not. */
function histograms (
  { name, values }: PromMetric,
  times: { startTime: HrTime, endTime: HrTime }
): DataPoint<Histogram>[] {
  const series = new Map<string, { attributes: Attributes, bounds: number[], upTo: number[], sum: number }>()
  for (const { value, labels, metricName } of values) {
    const { le, ...attributes } = labels as Attributes
    const key = JSON.stringify(attributes)
    let one = series.get(key)
    if (one === undefined) series.set(key, one = { attributes, bounds: [], upTo: [], sum: 0 })
    if (metricName === `${name}_sum`) one.sum = value
    else if (metricName === `${name}_bucket`) {
      one.upTo.push(value)
      if (le !== '+Inf') one.bounds.push(Number(le))
    }
  }
  return [...series.values()].map(({ attributes, bounds, upTo, sum }) => ({
    ...times,
    attributes,
    value: {
      buckets: { boundaries: bounds, counts: upTo.map((count, i) => count - (upTo[i - 1] ?? 0)) },
      count: upTo.at(-1) ?? 0,
      sum
    }
  }))
}
