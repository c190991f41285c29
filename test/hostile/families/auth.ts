import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import Fastify from 'fastify'
import type { RouteOptions } from 'fastify'
import refit from '../../../src/app/plugin.ts'
import { packageRoot } from '../../../src/root.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import type { Random } from '../lib/random.ts'
import { ADMIN_KEY, API_KEY } from '../lib/world.ts'
import type { Family, World } from '../lib/world.ts'

type Level = 'public' | 'normal' | 'admin'

interface Operation {
  method: string
  path: string
  level: Level
}

/** Over every route of openapi/openapi.json: nobody comes in without the key of its level, under any spelling. */
export const auth: Family = {
  name: 'auth',
  attack: async (world, random) => {
    const levels = await declaredLevels()
    const operations = readOperations(levels)
    world.check(
      'every route of openapi.json declares a level',
      operations.every(({ level }) => level !== undefined),
      () =>
        operations.filter(({ level }) => level === undefined).map(({ method, path }) => `${method} ${path}`).join(', ')
    )
    await inParallel(operations.filter(({ level }) => level !== 'public'), async operation => {
      await withoutKey(world, operation, random)
      await underOtherNames(world, operation, random)
      if (operation.level === 'admin') await withApiKey(world, operation)
    })
    await inParallel(operations, async operation => await asPage(world, operation, random))
  }
}

/** The levels that routes declare. test/auth.test.ts holds them. */
async function declaredLevels (): Promise<Map<string, Level>> {
  const app = Fastify()
  const levels = new Map<string, Level>()
  app.addHook('onRoute', (route: RouteOptions) => {
    for (const method of [route.method].flat()) {
      levels.set(`${method} ${route.url.replace(/(?<=.)\/$/, '')}`, route.config?.auth as Level)
    }
  })
  const engine = new FakeEngine()
  await app.register(refit, { engine, tokenizer: null, ui: true })
  await app.ready()
  await app.close()
  await engine.close()
  return levels
}

function readOperations (levels: Map<string, Level>): Operation[] {
  const { paths } = JSON.parse(readFileSync(join(packageRoot, 'openapi/openapi.json'), 'utf8')) as {
    paths: Record<string, Record<string, unknown>>
  }
  return Object.entries(paths).flatMap(([path, methods]) =>
    Object.keys(methods).map(name => {
      const method = name.toUpperCase()
      // Names of models and adapters may hold slashes.
      const route = path
        .replace(/(?<=.)\/$/, '')
        .replace(/^(\/v1\/models|\/adapters|\/adapter_files)\/\{name\}$/, '$1/*')
        .replace(/\{(\w+)\}/g, ':$1')
      return { method, path: path.replace(/\{\w+\}/g, 'x'), level: levels.get(`${method} ${route}`)! }
    })
  )
}

function wrongKeys (random: Random): Record<string, string | string[]>[] {
  const as = (authorization: string | string[]): Record<string, string | string[]> => ({ authorization })
  return [
    {},
    ...random.some([
      as('Bearer '),
      as('Bearer'),
      as(API_KEY),
      as(`Basic ${Buffer.from(`:${ADMIN_KEY}`).toString('base64')}`),
      as(`Bearer ${ADMIN_KEY.slice(0, -1)}`),
      as(`Bearer ${ADMIN_KEY}x`),
      as(`Bearer ${ADMIN_KEY.toUpperCase()}`),
      as(`Bearer undefined`),
      as('Bearer null'),
      as(`Bearer x, Bearer ${ADMIN_KEY}`),
      as(`Bearer ${'x'.repeat(4000)}`),
      as(['Bearer x', 'Bearer y']),
      { 'x-api-key': `${API_KEY}x` },
      { 'x-nemo-rl-refit-key': 'x' },
      { 'proxy-authorization': `Bearer ${ADMIN_KEY}` },
      { cookie: `authorization=Bearer ${ADMIN_KEY}` },
      { 'x-forwarded-for': '127.0.0.1', 'x-original-url': '/health', 'x-rewrite-url': '/health' },
      { 'x-http-method-override': 'GET' }
    ], 3)
  ]
}

/** 403 is the refusal of dialects that expect their key in a header of their own. */
const isRefused = (status: number): boolean => status === 401 || status === 403

const BODIES = [undefined, {}, '{', { abort_all: true, new_version: 'hostile', model_path: '/' }, Buffer.alloc(9)]

async function withoutKey (world: World, { method, path }: Operation, random: Random): Promise<void> {
  for (const headers of wrongKeys(random)) {
    const body = method === 'GET' ? undefined : random.pick(BODIES)
    const reply = await world.keyed.call(path, { method, body, headers })
    world.check(
      'without its key a route answers 401 or 403',
      isRefused(reply.status),
      () =>
        `${method} ${path} ${JSON.stringify(headers)} ${JSON.stringify(body)}: ${reply.status} ${
          reply.text.slice(0, 300)
        }`
    )
  }
}

async function withApiKey (world: World, { method, path }: Operation): Promise<void> {
  const headers = { authorization: `Bearer ${API_KEY}` }
  const reply = await world.keyed.call(path, { method, body: method === 'GET' ? undefined : {}, headers })
  world.check(
    'with the API key a route of admins answers 401 or 403',
    isRefused(reply.status),
    () => `${method} ${path}: ${reply.status} ${reply.text.slice(0, 300)}`
  )
}

/** Spellings that a router or a proxy may take for the same path. */
async function underOtherNames (world: World, { method, path }: Operation, random: Random): Promise<void> {
  const first = path.slice(1, 2)
  const names = [
    `/%${first.charCodeAt(0).toString(16)}${path.slice(2)}`,
    `/${path}`,
    `/.${path}`,
    `/health/..${path}`,
    `${path}/`,
    `${path}?key=${ADMIN_KEY}&api_key=${API_KEY}`,
    `${path};a=b`,
    `${path}%2f`,
    `${path}%00`,
    path.toUpperCase(),
    `${world.keyed.url}${path}`
  ]
  for (const name of random.some(names, 4)) {
    const reply = await world.keyed.call(name, { method, body: method === 'GET' ? undefined : {} })
    world.check(
      'no other spelling of a path goes past the key',
      [400, 401, 403, 404, 405, 414].includes(reply.status),
      () => `${method} ${name}: ${reply.status} ${reply.text.slice(0, 300)}`
    )
  }
}

/** A page of another website, to a server without keys. */
async function asPage (world: World, { method, path, level }: Operation, random: Random): Promise<void> {
  const foreign: Record<string, string>[] = [
    { origin: 'http://evil.example' },
    { origin: 'null' },
    { origin: `http://127.0.0.1:${world.open.port + 1}` },
    { 'sec-fetch-site': 'cross-site' },
    { host: 'evil.example' }
  ]
  for (const headers of random.some(foreign, 2)) {
    const reply = await world.open.call(path, { method, body: method === 'GET' ? undefined : {}, headers })
    const isGood = reply.status === 403 || (level === 'public' && method === 'GET')
    world.check(
      'a page of another website is refused',
      isGood,
      () => `${method} ${path} ${JSON.stringify(headers)}: ${reply.status} ${reply.text.slice(0, 300)}`
    )
  }
}

async function inParallel<T> (items: readonly T[], use: (item: T) => Promise<void>): Promise<void> {
  const queue = items.values()
  await Promise.all(Array.from({ length: 8 }, async () => {
    for (const item of queue) await use(item)
  }))
}
