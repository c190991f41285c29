import anthropicRoutes from '../../routes/anthropic/index.ts'
import arealRoutes from '../../routes/areal/index.ts'
import checkpointEngineRoutes from '../../routes/checkpoint-engine/index.ts'
import nemoRlRoutes from '../../routes/nemo-rl/index.ts'
import openaiRoutes from '../../routes/openai/index.ts'
import primeRlRoutes from '../../routes/prime-rl/index.ts'
import refitRoutes from '../../routes/refit/index.ts'
import sglangRoutes from '../../routes/sglang/index.ts'
import skyrlRoutes from '../../routes/skyrl/index.ts'
import trlRoutes from '../../routes/trl/index.ts'
import vllmRoutes from '../../routes/vllm/index.ts'
import { RefitError } from '../errors.ts'
import type { Routes } from '../http/context.ts'
import { anthropic } from '../dialects/anthropic/dialect.ts'
import { areal } from '../dialects/areal/dialect.ts'
import { checkpointEngine } from '../dialects/checkpoint-engine/dialect.ts'
import type { Dialect } from '../dialects/dialect.ts'
import { nemoRl } from '../dialects/nemo-rl/dialect.ts'
import { openai } from '../dialects/openai/dialect.ts'
import { primeRl } from '../dialects/prime-rl/dialect.ts'
import { refit } from '../dialects/refit/dialect.ts'
import { sglang } from '../dialects/sglang/dialect.ts'
import { skyrl } from '../dialects/skyrl/dialect.ts'
import { trl } from '../dialects/trl/dialect.ts'
import { vllm } from '../dialects/vllm/dialect.ts'

/** A dialect with its routes. */
export interface ServedDialect<Name extends string = string> extends Dialect<Name> {
  routes: readonly Routes[]
}

// The one list of dialects. A new dialect is a folder in src/dialects, a folder in routes, and a line here.

/** Every server has these. */
export const BASE_DIALECTS = [
  { ...sglang, routes: sglangRoutes },
  { ...openai, routes: openaiRoutes },
  { ...refit, routes: refitRoutes }
] as const satisfies ServedDialect[]

/** A server has all of these, unless `--dialects` chooses some. */
export const DIALECTS = [
  { ...vllm, routes: vllmRoutes },
  { ...skyrl, routes: skyrlRoutes },
  { ...areal, routes: arealRoutes },
  { ...primeRl, routes: primeRlRoutes },
  { ...nemoRl, routes: nemoRlRoutes },
  { ...trl, routes: trlRoutes },
  { ...checkpointEngine, routes: checkpointEngineRoutes },
  { ...anthropic, routes: anthropicRoutes }
] as const satisfies ServedDialect[]

export const ALL_DIALECTS: readonly ServedDialect[] = [...BASE_DIALECTS, ...DIALECTS]

export type DialectName = (typeof DIALECTS)[number]['name']

export const DIALECT_NAMES: readonly DialectName[] = DIALECTS.map(({ name }) => name)

/**
 * The dialects that `--dialects` chooses, in the order of the list; none given: all. Throws CONFIG for an unknown name.
 */
export function chooseDialects (names: readonly string[]): ReadonlySet<DialectName> {
  const known: readonly string[] = DIALECT_NAMES
  const unknown = names.find(name => !known.includes(name))
  if (unknown !== undefined) {
    throw new RefitError(
      'CONFIG',
      `--dialects: expected ${DIALECT_NAMES.join(', ')}, got ${JSON.stringify(unknown)}`,
      { param: 'dialects' }
    )
  }
  return new Set(names.length === 0 ? DIALECT_NAMES : names as readonly DialectName[])
}

/** Name of the dialect that lists the path of a route. */
export function dialectOf (path: string): string | undefined {
  return ALL_DIALECTS.find(({ calls }) => path in calls)?.name
}

/** The plugins of the chosen dialects, each once: dialects have some of them in common. */
export function chooseRoutes (chosen: ReadonlySet<string>): ReadonlySet<Routes> {
  const served: readonly ServedDialect[] = [...BASE_DIALECTS, ...DIALECTS.filter(({ name }) => chosen.has(name))]
  return new Set(served.flatMap(({ routes }) => routes))
}
