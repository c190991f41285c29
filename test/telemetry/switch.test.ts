import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync, readdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import t from 'tap'
import type { Test } from 'tap'
import { packageRoot } from '../../src/root.ts'
import { telemetryOptions } from '../../src/telemetry/telemetry.ts'
import { otlpReceiver, protobufFields } from '../helpers/load/otlp-receiver.ts'

t.test('it is off unless an endpoint is given, and the standard variables count', t => {
  t.equal(telemetryOptions(null, {}), null)
  t.equal(telemetryOptions(null, { OTEL_SERVICE_NAME: 'x' }), null)
  const defaults = { protocol: 'http/protobuf', traces: true, metrics: true, metricIntervalMs: 60_000 }
  t.strictSame(telemetryOptions('http://h:4318', {}), { endpoint: 'http://h:4318', ...defaults })
  const env = { OTEL_EXPORTER_OTLP_ENDPOINT: 'http://h:4318' }
  t.strictSame(telemetryOptions(null, env), { endpoint: null, ...defaults })
  t.equal(telemetryOptions('http://h:4318', { OTEL_SDK_DISABLED: 'true' }), null)
  t.equal(telemetryOptions(null, { ...env, OTEL_TRACES_EXPORTER: 'none', OTEL_METRICS_EXPORTER: 'none' }), null)
  t.match(
    telemetryOptions(null, {
      ...env,
      OTEL_TRACES_EXPORTER: 'none',
      OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json',
      OTEL_METRIC_EXPORT_INTERVAL: '5000'
    }),
    { traces: false, metrics: true, protocol: 'http/json', metricIntervalMs: 5000 }
  )
  t.end()
})

t.test('settings that cannot work are refused', t => {
  const refused = (message: RegExp, endpoint: string, env: Record<string, string> = {}): void => {
    t.throws(() => telemetryOptions(endpoint, env), { code: 'CONFIG', message })
  }
  refused(/--otlp-endpoint: expected a URL such as .*, got "h:4318"/, 'h:4318')
  refused(/must not contain a name or a password: use OTEL_EXPORTER_OTLP_HEADERS/, 'http://me:pw@h:4318')
  refused(/OTEL_EXPORTER_OTLP_PROTOCOL: expected http\/protobuf or http\/json, got "grpc"/, 'http://h:4318', {
    OTEL_EXPORTER_OTLP_PROTOCOL: 'grpc'
  })
  refused(/OTEL_TRACES_EXPORTER: expected otlp or none, got "zipkin"/, 'http://h', { OTEL_TRACES_EXPORTER: 'zipkin' })
  t.end()
})

t.test('no file outside of src/telemetry imports OpenTelemetry, and its own start is loaded on demand', t => {
  const files = ['src', 'routes'].flatMap(folder =>
    readdirSync(join(packageRoot, folder), { recursive: true, encoding: 'utf8' })
      .filter(name => name.endsWith('.ts'))
      .map(name => join(folder, name))
  )
  const importing = (pattern: RegExp): string[] =>
    files.filter(file => pattern.test(readFileSync(join(packageRoot, file), 'utf8')))
  const users = importing(/from '@opentelemetry/)
  t.ok(users.length >= 4)
  t.strictSame(users.filter(file => !file.startsWith('src/telemetry/')), [])
  t.notOk(users.includes('src/telemetry/telemetry.ts'))
  t.strictSame(importing(/^import .*'\.[^']*\/telemetry\/(?!telemetry\.ts)/m), [])
  t.strictSame(importing(/await import\('[^']*telemetry\/otlp\.ts'\)/), ['src/cli/open-telemetry.ts'])
  t.end()
})

/** Serves, generates once and ends. Returns the modules of OpenTelemetry's SDK that the process had loaded. */
async function loadedBy (t: Test, env: Record<string, string>): Promise<string[]> {
  const preload = join(t.testdir({}), 'preload.cjs')
  writeFileSync(
    preload,
    "process.on('exit', () => console.error('LOADED ' + JSON.stringify(Object.keys(require.cache)" +
      '.flatMap(path => /@opentelemetry\\/(?!api\\/)([a-z-]+)/.exec(path)?.[1] ?? []))))'
  )
  // Compiled without being joined, so that each module is a file.
  const child = spawn(process.execPath, [
    '--require',
    preload,
    join(packageRoot, 'build/test/src/main.js'),
    'serve',
    join(packageRoot, 'models/adder-base'),
    '--port',
    '0',
    '--threads',
    '1'
  ], { env: { PATH: process.env['PATH'], HOME: '/nonexistent', ...env }, stdio: ['ignore', 'pipe', 'pipe'] })
  t.teardown(() => child.kill('SIGKILL'))
  let err = ''
  child.stderr.on('data', part => {
    err += String(part)
  })
  const exit = once(child, 'exit')
  for await (const line of createInterface({ input: child.stdout })) {
    const url = /is ready on (http:[^"\s]+)/.exec(line)?.[1]
    if (url === undefined) continue
    const reply = await fetch(`${url}/generate`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({ text: '1+2=', sampling_params: { max_new_tokens: 4 } })
    })
    t.equal(reply.status, 200)
    child.kill('SIGTERM')
  }
  await exit
  // The process and its worker threads write a line each.
  const lists = [...err.matchAll(/LOADED (\[.*?\])/g)].map(([, list]) => JSON.parse(list!) as string[])
  t.ok(lists.length > 0, err)
  return [...new Set(lists.flat())]
}

t.test('a server without an endpoint loads nothing of it', async t => {
  t.strictSame(await loadedBy(t, {}), [])
})

t.test('a server with the standard variables sends traces and metrics before it ends', async t => {
  const { url, received } = await otlpReceiver(t)
  const loaded = await loadedBy(t, {
    OTEL_EXPORTER_OTLP_ENDPOINT: url,
    OTEL_EXPORTER_OTLP_HEADERS: 'x-team=rl',
    OTEL_SERVICE_NAME: 'rollout-7'
  })
  t.ok(loaded.includes('sdk-metrics') && loaded.includes('sdk-trace'), loaded.join(' '))
  const paths = new Set(received.map(({ path }) => path))
  t.ok(paths.has('/v1/traces') && paths.has('/v1/metrics'))
  for (const { headers, body } of received) {
    t.equal(headers['x-team'], 'rl')
    t.ok(body.includes('rollout-7'))
    t.ok(protobufFields(body).length > 0)
  }
})
