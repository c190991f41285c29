import type { Test } from 'tap'
import { cpSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { joinLinks } from '../../src/peer/remote-link.ts'
import type { Link } from '../../src/peer/remote-link.ts'
import { hostStores } from '../../src/peer/remote-stores.ts'
import { linkName } from '../../src/peer/send-groups.ts'
import type { SendLayout } from '../../src/peer/weight-sender.ts'
import { receiveWeights } from '../../src/peer/weight-receiver.ts'
import { packageRoot } from '../../src/root.ts'
import { createServer } from '../../src/app/server.ts'
import type { ServerOptions } from '../../src/app/server.ts'
import { Deadline } from '../../src/rendezvous/deadline.ts'
import type { WriteReport } from '../../src/contract/weight-source.ts'

export interface Reply {
  status: number
  body: any
}
export interface Member {
  engine: LocalEngine
  url: string
  post: (path: string, body?: unknown) => Promise<Reply>
  get: (path: string) => Promise<Reply>
  sums: () => Promise<unknown>
  close: () => Promise<void>
}

export const SMALL: EngineOptions = { threads: 1, maxTotalTokens: 4096 }
export const PROMPTS = ['12+30=', '7+8=', '99+1=', '50+50=']

export function modelFolder (name: 'adder' | 'adder-base'): string {
  return join(packageRoot, 'models', name)
}

/** A copy of a model without its weights. */
export function bareFolder (t: Test, name: 'adder' | 'adder-base'): string {
  const folder = mkdtempSync(join(tmpdir(), 'refit-fleet-'))
  cpSync(modelFolder(name), folder, { recursive: true, filter: path => !path.endsWith('.safetensors') })
  t.teardown(() => {
    rmSync(folder, { recursive: true })
  })
  return folder
}

/** A server on an engine. */
export async function member (t: Test, engine: LocalEngine, options: Partial<ServerOptions> = {}): Promise<Member> {
  const app = await createServer({
    engine,
    closeGraceMs: 500,
    modelRoots: [join(packageRoot, 'models')],
    warmUp: false,
    ...options
  })
  t.teardown(async () => {
    await app.close()
    await engine.close()
  })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  const call = async (path: string, init: RequestInit = {}): Promise<Reply> => {
    const key = options.adminApiKey ?? options.apiKey
    const reply = await fetch(url + path, {
      ...init,
      headers: { ...init.headers, ...key === undefined ? {} : { authorization: `Bearer ${key}` } }
    })
    return { status: reply.status, body: await reply.json() }
  }
  const post = async (path: string, body: unknown = {}): Promise<Reply> =>
    await call(path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) })
  return {
    engine,
    url,
    post,
    get: call,
    sums: async () => (await post('/weights_checker')).body.checksums,
    close: async () => {
      await app.close()
    }
  }
}

export async function serve (
  t: Test,
  model: 'adder' | 'adder-base',
  options: EngineOptions = {},
  server: Partial<ServerOptions> = {}
): Promise<Member> {
  return await member(t, await createEngine(modelFolder(model), { ...SMALL, ...options }), server)
}

export async function answers ({ post }: Member): Promise<string[]> {
  const { status, body } = await post('/generate', {
    text: PROMPTS,
    sampling_params: { temperature: 0, max_new_tokens: 8 }
  })
  if (status !== 200) throw new Error(`/generate answered ${status}: ${JSON.stringify(body)}`)
  return body.map((one: any) => one.text)
}

export interface Hand {
  name: string
  ports: string
  send: (signal?: AbortSignal) => Promise<Reply>
  begin: (signal?: AbortSignal) => Promise<{ sent: Promise<Reply> }>
  receive: () => Promise<WriteReport>
  links: Link[]
  close: () => Promise<void>
}

/** Joins a sender's group by hand, for tests that stop in the middle of it. */
export async function joinByHand (
  sender: Member,
  into: LocalEngine,
  { layout = 'checkpoint', pieceBytes = 32_768, more = {} }: {
    layout?: SendLayout
    pieceBytes?: number
    more?: object
  } = {}
): Promise<Hand> {
  const timeoutMs = 60_000
  const deadline = new Deadline({}, timeoutMs)
  const ranks = layout === 'parameters' ? sender.engine.info.ranks : 1
  const stores = await hostStores('127.0.0.1', new Array<number>(ranks).fill(0), deadline)
  const name = `by-hand-${stores.ports[0]}`
  const ports = stores.ports.join(',')
  const { store } = into.held!
  const links: Link[] = []
  const wanted = stores.clients.map((client, i) => ({
    addon: store.addon,
    core: store.core,
    backend: 'gloo' as const,
    store: client,
    name: linkName(name, stores.ports[i]!, i),
    size: 2,
    rank: 1,
    ranks: 1,
    coreRank: i,
    host: '127.0.0.1'
  }))
  const [reply] = await Promise.all([
    sender.post('/init_weights_send_group_for_remote_instance', {
      master_address: '127.0.0.1',
      ports,
      group_rank: 0,
      world_size: 2,
      group_name: name,
      backend: 'gloo',
      layout,
      receiver_hosts: true,
      barrier: true,
      piece_bytes: pieceBytes,
      timeout: timeoutMs / 1000,
      ...more
    }),
    joinLinks(wanted, { deadline, still: async run => await run() }, links)
  ])
  if (reply.status !== 200) throw new Error(JSON.stringify(reply))
  const send = async (signal?: AbortSignal): Promise<Reply> => {
    const answer = await fetch(`${sender.url}/send_weights_to_remote_instance`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({ master_address: '127.0.0.1', ports, group_name: name }),
      signal: signal ?? null
    })
    return { status: answer.status, body: await answer.json() }
  }
  return {
    name,
    ports,
    links,
    send,
    // A group serves one request. Once the second request is refused, the first one is in the queue.
    begin: async signal => {
      const both = [send(signal), send(signal)]
      const refused = await Promise.race(both.map(async (sent, i) => ({ ...await sent, i })))
      if (refused.status !== 404) throw new Error(`expected one of two to be refused, got ${JSON.stringify(refused)}`)
      return { sent: both[1 - refused.i]! }
    },
    receive: async () => await receiveWeights(store, links, { layout, pieceBytes, timeoutMs }),
    close: async () => {
      for (const link of links) await link.end(true)
      await stores.close()
    }
  }
}

export async function until (condition: () => boolean | Promise<boolean>): Promise<void> {
  while (!await condition()) await new Promise(resolve => setTimeout(resolve, 5))
}

/** Resolves when the loading engine has joined the peer's group and waits in its own queue of updates. */
export function joined ({ engine }: Pick<Member, 'engine'>): Promise<void> {
  const { store } = engine.held!
  const inTurn = store.inTurn.bind(store)
  return new Promise<void>(resolve => {
    store.inTurn = async (...rest) => {
      resolve()
      return await inTurn(...rest)
    }
  })
}
