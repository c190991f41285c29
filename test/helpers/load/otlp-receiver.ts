import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import { gunzipSync } from 'node:zlib'
import type { Test } from 'tap'

/** A span as a collector sees it; times are nanoseconds since the epoch. */
export interface ReceivedSpan {
  name: string
  traceId: string
  spanId: string
  parentSpanId: string
  kind: number
  start: bigint
  end: bigint
  attributes: Record<string, unknown>
  error: boolean
}

export interface Received {
  path: string
  type: string | undefined
  headers: Record<string, unknown>
  body: Buffer
}

/** A collector for OTLP over HTTP that keeps what it gets. */
export async function otlpReceiver (t: Test): Promise<{ url: string, received: Received[] }> {
  const received: Received[] = []
  const server = createServer((request, reply) => {
    const parts: Buffer[] = []
    request.on('data', part => parts.push(part))
    request.on('end', () => {
      const { url: path = '', headers } = request
      const sent = Buffer.concat(parts)
      const body = headers['content-encoding'] === 'gzip' ? gunzipSync(sent) : sent
      received.push({ path, type: headers['content-type'], headers, body })
      reply.writeHead(200, { 'content-type': 'application/json' }).end('{}')
    })
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  t.teardown(() => {
    server.closeAllConnections()
    server.close()
  })
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, received }
}

/** The spans of all JSON bodies. */
export function spansOf (received: readonly Received[]): ReceivedSpan[] {
  return received
    .filter(({ path }) => path === '/v1/traces')
    .flatMap(({ body }) => JSON.parse(String(body)).resourceSpans)
    .flatMap(({ scopeSpans }: any) => scopeSpans)
    .flatMap(({ spans }: any) => spans)
    .map((span: any) => ({
      name: span.name,
      traceId: span.traceId,
      spanId: span.spanId,
      parentSpanId: span.parentSpanId ?? '',
      kind: span.kind,
      start: BigInt(span.startTimeUnixNano),
      end: BigInt(span.endTimeUnixNano),
      attributes: attributesOf(span.attributes),
      error: span.status?.code === 2
    }))
}

/** The metrics of all JSON bodies, by name; a later body replaces an earlier one. */
export function metricsOf (received: readonly Received[]): Record<string, any> {
  return Object.fromEntries(
    received
      .filter(({ path }) => path === '/v1/metrics')
      .flatMap(({ body }) => JSON.parse(String(body)).resourceMetrics)
      .flatMap(({ scopeMetrics }: any) => scopeMetrics)
      .flatMap(({ metrics }: any) => metrics)
      .map((metric: any) => [metric.name, metric])
  )
}

export function attributesOf (list: any[]): Record<string, unknown> {
  return Object.fromEntries(list.map(({ key, value }) => [key, valueOf(value)]))
}

function valueOf (value: any): unknown {
  if (value.arrayValue !== undefined) return value.arrayValue.values.map(valueOf)
  const [only] = Object.values(value)
  return value.intValue === undefined ? only : Number(only)
}

/** The fields of one protobuf message: numbers with their bytes or integers. */
export function protobufFields (bytes: Buffer): { field: number, value: Buffer | bigint }[] {
  const fields: { field: number, value: Buffer | bigint }[] = []
  let at = 0
  const varint = (): bigint => {
    let value = 0n
    for (let shift = 0n;; shift += 7n) {
      const byte = bytes[at++]!
      value |= BigInt(byte & 127) << shift
      if (byte < 128) return value
    }
  }
  while (at < bytes.length) {
    const tag = varint()
    const [field, wire] = [Number(tag >> 3n), Number(tag & 7n)]
    if (wire === 0) fields.push({ field, value: varint() })
    else {
      const length = wire === 2 ? Number(varint()) : wire === 1 ? 8 : 4
      fields.push({ field, value: bytes.subarray(at, at += length) })
    }
  }
  return fields
}
