import { OPTIONS } from './schema.ts'
import type { Option, OptionTable } from './option.ts'
import { flagName } from './option.ts'

/** The configuration for the log: keyed by flag name, secrets as ***. */
export function redact (config: object, table: OptionTable = OPTIONS): Record<string, unknown> {
  return Object.fromEntries(
    Object.entries<Option>(table).map(([key, option]) => {
      const value = (config as Record<string, unknown>)[key]
      return [flagName(key), option.secret === true && value !== null ? '***' : value]
    })
  )
}
