import { RefitError } from '../errors.ts'
import type { ModelTable } from '../model/architecture.ts'
import type { CoveredNames } from './covered-names.ts'
import { missingNames } from './plan.ts'

const SHOWN_NAMES = 5

/**
 * The model's own names of the tensors that a caller expects: a list, or "all"; null if it expects none. Names that the
 * model has no use for (a tied head) are left out. Throws WEIGHTS_UNKNOWN_NAME for a name that it does not have.
 */
export function expectedNames (
  table: ModelTable,
  coverage: CoveredNames,
  expected: readonly string[] | 'all' | undefined
): ReadonlySet<string> | null {
  if (expected === undefined) return null
  if (expected === 'all') return new Set(missingNames(table, new Set()))
  const names = new Set<string>()
  const unknown: string[] = []
  for (const given of expected) {
    const name = table.canonical(given)
    const plan = table.tensors.get(name)
    if (plan !== undefined) { for (const weight of coverage.names(plan)) names.add(weight) }
    else if (!table.ignored(name)) unknown.push(given)
  }
  if (unknown.length === 0) return names
  const shown = unknown.slice(0, SHOWN_NAMES).map(name => `"${name}"`).join(', ')
  throw new RefitError(
    'WEIGHTS_UNKNOWN_NAME',
    `the model has no tensor ${shown}${
      unknown.length > SHOWN_NAMES ? ` and ${unknown.length - SHOWN_NAMES} more` : ''
    }, so that none can be expected`,
    { param: 'expected' }
  )
}
