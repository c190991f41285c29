import { cpSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { FastifyInstance } from 'fastify'
import type { Test } from 'tap'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { createGateway } from '../../src/app/gateway-server.ts'
import type { GatewayServer, GatewayServerOptions } from '../../src/app/gateway-server.ts'
import { packageRoot } from '../../src/root.ts'
import { createServer } from '../../src/app/server.ts'
import type { ServerOptions } from '../../src/app/server.ts'

export interface EngineServer {
  url: string
  port: number
  app: FastifyInstance
  engine: LocalEngine
  kill: () => Promise<void>
}

/** A folder with copies of the bundled models, for updates from disk. */
export function modelFolder (t: Test): string {
  const folder = mkdtempSync(join(tmpdir(), 'refit-gateway-'))
  for (const model of ['adder', 'adder-base']) {
    cpSync(join(packageRoot, 'models', model), join(folder, model), { recursive: true })
  }
  t.teardown(() => {
    rmSync(folder, { recursive: true })
  })
  return folder
}

interface EngineServerOptions extends Partial<ServerOptions> {
  tp?: number
  model?: string
  weightVersion?: string
  enableLora?: boolean
  shadowWeights?: boolean
  /** Other options of its adapters. */
  lora?: Pick<EngineOptions, 'maxCpuLoras' | 'maxLoraRank' | 'maxLoras'>
}

/** A real refit server over the adder's base. */
export async function engineServer (
  t: Test,
  folder: string,
  {
    port = 0,
    tp = 1,
    model = 'adder-base',
    weightVersion = 'default',
    enableLora = false,
    shadowWeights = false,
    lora = {},
    ...options
  }: EngineServerOptions = {}
): Promise<EngineServer> {
  const engine = await createEngine(join(folder, model), {
    threads: 1,
    tp,
    maxTotalTokens: 4096,
    weightVersion,
    enableLora,
    shadowWeights,
    ...lora
  })
  const app = await createServer({ engine, modelRoots: [folder], closeGraceMs: 200, warmUp: false, ...options })
  const url = await app.listen({ host: '127.0.0.1', port })
  let ended: Promise<void> | undefined
  // As if the process died: connections break, also in the middle of a reply.
  const kill = async (): Promise<void> =>
    await (ended ??= (async () => {
      app.server.closeAllConnections()
      app.server.close()
      engine.abortAll()
      await app.close()
      await engine.close()
    })())
  t.teardown(kill)
  return { url, port: Number(new URL(url).port), app, engine, kill }
}

export interface Reply {
  status: number
  body: any
  headers: Headers
}

export interface GatewayUnderTest {
  url: string
  app: GatewayServer
  post: (path: string, body?: unknown, headers?: Record<string, string>) => Promise<Reply>
  get: (path: string) => Promise<Reply>
  states: () => Record<string, string>
  /** Waits until the engine at the address has that state. */
  until: (url: string, state: string) => Promise<void>
}

export async function gatewayTo (
  t: Test,
  engines: readonly string[],
  options: Partial<GatewayServerOptions> = {}
): Promise<GatewayUnderTest> {
  // Tests of refusals want them at once.
  const app = await createGateway({ engines, healthMs: 60, waitMs: 0, ...options })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  t.teardown(async () => {
    app.server.closeAllConnections()
    await app.close()
  })
  const call = async (path: string, init: RequestInit = {}): Promise<Reply> => {
    const reply = await fetch(url + path, init)
    const text = await reply.text()
    return {
      status: reply.status,
      headers: reply.headers,
      body: /json/.test(reply.headers.get('content-type') ?? '') ? JSON.parse(text) : text
    }
  }
  const { fleet } = app.gateway
  return {
    url,
    app,
    get: call,
    post: async (path, body = {}, headers = {}) =>
      await call(path, {
        method: 'POST',
        headers: { 'content-type': 'application/json', ...headers },
        body: JSON.stringify(body)
      }),
    states: () => Object.fromEntries(fleet.list.map(worker => [worker.url, worker.state])),
    until: async (engine, state) => {
      const end = performance.now() + 60_000
      for (;;) {
        const worker = fleet.list.find(({ url }) => url === engine)
        if ((worker?.state ?? 'gone') === state) return
        if (performance.now() > end) {
          throw new Error(`${engine} is ${worker?.state ?? 'gone'} (${worker?.reason ?? ''}), not ${state}`)
        }
        await new Promise(resolve => setTimeout(resolve, 10))
      }
    }
  }
}

export function ask (text: string, fields: object = {}, sampling: object = {}): object {
  return { text, sampling_params: { temperature: 0, max_new_tokens: 8, ...sampling }, ...fields }
}
