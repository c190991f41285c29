import { OPTIONS } from '../config.ts'
import type { Config, OptionKey } from '../config.ts'
import type { Option } from './option.ts'
import { flagName } from './option.ts'

/** The configuration as it may be logged: keyed by flag name, secrets as ***. */
export function redact (config: Config): Record<string, unknown> {
  return Object.fromEntries(Object.entries<Option>(OPTIONS).map(([key, option]) => {
    const value = config[key as OptionKey]
    return [flagName(key), option.secret === true && value !== null ? '***' : value]
  }))
}
