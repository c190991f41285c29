import { RefitError } from '../errors.ts'
import type { Routes } from '../http/context.ts'
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

/** A dialect with its routes, which only a server loads: the gateway needs none of their code. */
export interface ServedDialect<Name extends string = string> extends Dialect<Name> {
  routes: () => Promise<{ default: readonly Routes[] }>
}

// The one list of dialects. A new dialect is a folder in src/dialects, a folder in routes, and a line here.

/** Every server has these. */
export const BASE_DIALECTS = [
  { ...sglang, routes: async () => await import('../../routes/sglang/index.ts') },
  { ...openai, routes: async () => await import('../../routes/openai/index.ts') },
  { ...refit, routes: async () => await import('../../routes/refit/index.ts') }
] as const satisfies ServedDialect[]

/** A server has all of these, unless `--dialects` chooses some. */
export const DIALECTS = [
  { ...vllm, routes: async () => await import('../../routes/vllm/index.ts') },
  { ...skyrl, routes: async () => await import('../../routes/skyrl/index.ts') },
  { ...areal, routes: async () => await import('../../routes/areal/index.ts') },
  { ...primeRl, routes: async () => await import('../../routes/prime-rl/index.ts') },
  { ...nemoRl, routes: async () => await import('../../routes/nemo-rl/index.ts') },
  { ...trl, routes: async () => await import('../../routes/trl/index.ts') },
  { ...checkpointEngine, routes: async () => await import('../../routes/checkpoint-engine/index.ts') }
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

/** The route plugins of all dialects, by the dialect's name. */
export async function loadRoutes (): Promise<ReadonlyMap<string, readonly Routes[]>> {
  return new Map(
    await Promise.all(
      ALL_DIALECTS.map(async ({ name, routes }) => [name, (await routes()).default] as const)
    )
  )
}

/** The plugins of the chosen dialects, each once: dialects have some of them in common. */
export function chooseRoutes (
  routes: ReadonlyMap<string, readonly Routes[]>,
  chosen: ReadonlySet<string>
): ReadonlySet<Routes> {
  const names = [...BASE_DIALECTS.map(({ name }) => name), ...DIALECT_NAMES.filter(name => chosen.has(name))]
  return new Set(names.flatMap(name => routes.get(name) ?? []))
}
