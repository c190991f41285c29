import { OPTIONS } from './schema.ts'
import type { OptionKey } from './schema.ts'
import type { Option, OptionTable } from './option.ts'
import { aliasesOf, flagName } from './option.ts'
import { checkValue, parseText, withOffset } from './parse-value.ts'
import { suggest } from './suggest.ts'
import { RefitError } from '../errors.ts'

/** Every spelling of every flag, without dashes, aliases included. */
export const FLAGS: ReadonlyMap<string, OptionKey> = flagsOf(OPTIONS) as ReadonlyMap<string, OptionKey>

export type Values = Partial<Record<string, unknown>>

/** The spellings of a command's flags. */
export function flagsOf (table: OptionTable): ReadonlyMap<string, string> {
  return new Map(
    Object.entries<Option>(table).flatMap(([key, option]) =>
      [flagName(key), ...aliasesOf(option)].map(name => [name, key] as const)
    )
  )
}

/**
 * Reads `--name value`, `--name=value`, `--flag`, `--no-flag` and at most one word without dashes (MODEL). A later
 * value replaces an earlier one; a list grows.
 */
export function parseArguments (args: readonly string[], table: OptionTable = OPTIONS): Values {
  const flags = flagsOf(table)
  const values: Values = {}
  const positional: string[] = []
  for (let i = 0; i < args.length; i++) {
    const argument = args[i]!
    if (argument === '--') {
      positional.push(...args.slice(i + 1))
      break
    }
    if (!argument.startsWith('-') || argument === '-') {
      positional.push(argument)
      continue
    }
    const { key, name, inline, negated } = readFlag(argument, table, flags)
    const option = table[key]!
    let text = inline
    if (option.type === 'boolean') text ??= negated ? 'false' : 'true'
    else if (text === undefined) {
      text = args[++i]
      if (text === undefined || text.startsWith('--')) {
        throw new RefitError(
          'CONFIG',
          `${name} needs a value: ${name} ${option.value ?? 'VALUE'}`,
          { param: name }
        )
      }
    }
    values[key] = option.type === 'list'
      ? [
        ...values[key] as string[] ?? [],
        ...checkValue(option, option.separator === undefined ? [text] : text.split(option.separator), name) as string[]
      ]
      : withOffset(option, name.slice(2), parseText(option, text, name), name)
  }
  return takeModel(values, positional, table)
}

function readFlag (
  argument: string,
  table: OptionTable,
  flags: ReadonlyMap<string, string>
): { key: string, name: string, inline: string | undefined, negated: boolean } {
  const equals = argument.indexOf('=')
  const name = equals < 0 ? argument : argument.slice(0, equals)
  const inline = equals < 0 ? undefined : argument.slice(equals + 1)
  const bare = name.replace(/^--/, '')
  const key = flags.get(bare)
  if (key !== undefined && name.startsWith('--')) return { key, name, inline, negated: false }
  const positive = bare.startsWith('no-') ? flags.get(bare.slice(3)) : undefined
  if (positive !== undefined && table[positive]!.type === 'boolean' && inline === undefined) {
    return { key: positive, name, inline, negated: true }
  }
  const near = suggest(bare.replace(/^-/, '').replaceAll('_', '-').toLowerCase(), flags.keys())
  throw new RefitError(
    'CONFIG',
    `${name}: unknown option${
      near === undefined
        ? `; "refit ${'model' in table ? 'serve' : 'gateway'} --help" lists them all`
        : `; did you mean --${near}?`
    }`,
    { param: name }
  )
}

function takeModel (values: Values, positional: string[], table: OptionTable): Values {
  if (!('model' in table) && positional.length > 0) {
    throw new RefitError(
      'CONFIG',
      `${JSON.stringify(positional[0])}: expected options only, such as --engine http://host:30000`,
      { param: positional[0]! }
    )
  }
  const [model, extra] = positional
  if (extra !== undefined) {
    throw new RefitError(
      'CONFIG',
      `one MODEL is served at a time, got ${JSON.stringify(model)} and ${JSON.stringify(extra)}`,
      { param: 'MODEL' }
    )
  }
  if (model === undefined) return values
  if (values['model'] !== undefined && values['model'] !== model) {
    throw new RefitError(
      'CONFIG',
      `MODEL is given twice: ${JSON.stringify(model)} and --model ${JSON.stringify(values['model'])}`,
      { param: 'MODEL' }
    )
  }
  if (model === '') throw new RefitError('CONFIG', 'MODEL: expected a folder or a name, got ""', { param: 'MODEL' })
  return { ...values, model }
}
