import { OPTIONS } from './schema.ts'
import type { Option, OptionTable } from './option.ts'
import type { Values } from './parse-arguments.ts'
import { variableName } from './option.ts'
import { parseText } from './parse-value.ts'
import { suggest } from './suggest.ts'

export type Environment = Readonly<Record<string, string | undefined>>

/** Variables that other parts of refit read: paths of libraries, and build settings. */
const OTHERS = [
  'REFIT_NATIVE',
  'REFIT_CUDA',
  'REFIT_CUDA_ARCHS',
  'REFIT_CUDA_LIBRARY',
  'REFIT_CUDA_LIBS',
  'REFIT_WATCHDOG_SECONDS'
]

/**
 * Reads `REFIT_<FLAG>`; an empty variable counts as unset. An unknown variable that resembles a known one is reported,
 * never refused: Kubernetes sets REFIT_SERVICE_HOST and the like for a Service named refit.
 */
export function parseEnvironment (
  environment: Environment,
  table: OptionTable = OPTIONS
): { values: Values, warnings: string[] } {
  const values: Values = {}
  const known = new Map(Object.entries<Option>(table).map(([key, option]) => [variableName(key), { key, option }]))
  const warnings: string[] = []
  for (const [name, text] of Object.entries(environment)) {
    if (!name.startsWith('REFIT_') || text === undefined || text === '') continue
    const found = known.get(name)
    if (found !== undefined) values[found.key] = parseText(found.option, text, name)
    else if (!OTHERS.includes(name)) {
      const near = suggest(name, known.keys())
      if (near !== undefined) warnings.push(`${name} is not a variable that refit reads; did you mean ${near}?`)
    }
  }
  return { values, warnings }
}
