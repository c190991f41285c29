import { readFileSync } from 'node:fs'
import { OPTIONS } from './schema.ts'
import type { Values } from './parse-arguments.ts'
import { flagsOf } from './parse-arguments.ts'
import type { OptionTable } from './option.ts'
import { checkValue, withOffset } from './parse-value.ts'
import { suggest } from './suggest.ts'
import { RefitError } from '../errors.ts'

/** Reads a JSON object whose keys are flag names without the dashes in front (`_` instead of `-` is allowed). */
export function readConfigFile (path: string, table: OptionTable = OPTIONS): Values {
  const flags = flagsOf(table)
  const values: Values = {}
  for (const [name, value] of Object.entries(readObject(path))) {
    const flag = name.replaceAll('_', '-')
    const key = flags.get(flag)
    if (key === undefined) {
      const near = suggest(flag.toLowerCase(), flags.keys())
      throw new RefitError(
        'CONFIG',
        `${path}: unknown key ${JSON.stringify(name)}${
          near === undefined ? '' : `; did you mean ${JSON.stringify(near)}?`
        }`,
        { param: name }
      )
    }
    if (key === 'config') {
      throw new RefitError(
        'CONFIG',
        `${path}: a config file cannot name another one (key ${JSON.stringify(name)})`,
        { param: name }
      )
    }
    if (key in values) {
      throw new RefitError(
        'CONFIG',
        `${path}: ${JSON.stringify(name)} is another spelling of a key that is there already`,
        { param: name }
      )
    }
    if (value !== null) {
      const where = `${path}: ${name}`
      values[key] = withOffset(table[key]!, flag, checkValue(table[key]!, value, where), where)
    }
  }
  return values
}

function readObject (path: string): object {
  let content: unknown
  try {
    content = JSON.parse(readFileSync(path, 'utf8'))
  } catch (cause) {
    throw new RefitError('CONFIG', `--config: ${path} cannot be read as JSON: ${(cause as Error).message}`, {
      param: '--config',
      cause
    })
  }
  if (typeof content === 'object' && content !== null && !Array.isArray(content)) return content
  throw new RefitError(
    'CONFIG',
    `--config: ${path}: expected a JSON object of options, got ${
      Array.isArray(content) ? 'an array' : JSON.stringify(content)
    }`,
    { param: '--config' }
  )
}
