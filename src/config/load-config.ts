import { isIP } from 'node:net'
import { OPTIONS } from './schema.ts'
import type { Config, OptionKey } from './schema.ts'
import type { Option, OptionTable } from './option.ts'
import type { Environment } from './parse-environment.ts'
import { parseArguments } from './parse-arguments.ts'
import { parseEnvironment } from './parse-environment.ts'
import { readConfigFile } from './read-config-file.ts'
import { RefitError } from '../errors.ts'

export interface LoadedConfig {
  config: Config
  /** Origin of each value that is not a default. */
  sources: Partial<Record<OptionKey, 'flag' | 'environment' | 'file'>>
  warnings: string[]
}

/**
 * Flags take precedence over the environment, the file and the defaults, in this order. Throws CONFIG naming the flag,
 * variable or key.
 */
export function loadConfig (args: readonly string[], environment: Environment): LoadedConfig {
  return loadOptions(OPTIONS, args, environment) as LoadedConfig
}

/**
 * The same for the table of another command, which also has the options of an address (`host`, `apiKey`, `adminApiKey`,
 * `insecure`).
 */
export function loadOptions (
  table: OptionTable,
  args: readonly string[],
  environment: Environment
): { config: object, sources: Record<string, 'flag' | 'environment' | 'file'>, warnings: string[] } {
  const flags = parseArguments(args, table)
  const { values: variables, warnings } = parseEnvironment(environment, table)
  const path = flags['config'] ?? variables['config']
  const file = typeof path === 'string' ? readConfigFile(path, table) : {}
  const sources: Record<string, 'flag' | 'environment' | 'file'> = {}
  const config = Object.fromEntries(
    Object.entries<Option>(table).map(([key, option]) => {
      for (const [source, values] of [['flag', flags], ['environment', variables], ['file', file]] as const) {
        if (values[key] === undefined) continue
        sources[key] = source
        return [key, values[key]]
      }
      return [key, option.default]
    })
  )
  checkAddress(config as unknown as Config)
  return { config, sources, warnings }
}

/** True for an address that only this machine can reach. */
export function isLoopback (host: string): boolean {
  const address = host.replace(/^\[(.*)\]$/, '$1').toLowerCase()
  if (address === 'localhost' || address === '::1' || address === '0:0:0:0:0:0:0:1') return true
  const mapped = address.startsWith('::ffff:') ? address.slice('::ffff:'.length) : address
  return isIP(mapped) === 4 && mapped.startsWith('127.')
}

function checkAddress ({ host, apiKey, adminApiKey, insecure }: Config): void {
  if (isLoopback(host) || apiKey !== null || adminApiKey !== null || insecure) return
  throw new RefitError(
    'CONFIG',
    `--host ${host} can be reached by others, who could replace the weights: set --api-key or --admin-api-key ` +
      '(REFIT_API_KEY, REFIT_ADMIN_API_KEY), or --insecure if the network is trusted',
    { param: '--host' }
  )
}
