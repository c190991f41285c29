import type { Option } from './option.ts'
import { delimiter } from 'node:path'
import { RefitError } from '../errors.ts'
import { suggest } from './suggest.ts'

type Value = string | number | boolean | string[]

/** Parses a value from the command line or the environment. `where` names it in errors (`--port`, `REFIT_PORT`). */
export function parseText (option: Option, text: string, where: string): Value {
  switch (option.type) {
    case 'boolean':
      return parseBoolean(text, where)
    case 'integer':
    case 'number': {
      const number = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text.trim()) ? Number(text) : NaN
      return checkValue(option, Number.isNaN(number) ? text : number, where)
    }
    case 'list':
      return checkValue(option, text.split(option.separator ?? delimiter).filter(part => part !== ''), where)
    default:
      return checkValue(option, text, where)
  }
}

/** Checks a value that already has a type, as from a JSON file. */
export function checkValue (option: Option, value: unknown, where: string): Value {
  switch (option.type) {
    case 'boolean':
      if (typeof value === 'boolean') return value
      break
    case 'integer':
    case 'number':
      if (typeof value === 'number' && inRange(option, value)) return value
      break
    case 'list':
      if (typeof value === 'string' && value !== '') return checkValue(option, [value], where)
      if (Array.isArray(value) && value.every(part => typeof part === 'string' && part !== '')) {
        return option.choices === undefined ? value : value.map(part => checkChoice(option, part, where))
      }
      break
    case 'choice':
      if (typeof value === 'string') return checkChoice(option, value, where)
      break
    case 'string': {
      if (typeof value !== 'string' || value === '') break
      if (option.pattern === undefined) return value
      const word = value.toLowerCase()
      const meant = option.spellings?.[word] ?? word
      if (option.pattern.test(meant)) return meant
    }
  }
  throw wrong(option, value, where)
}

/** The value of an option whose spelling counts differently (`Option.offsetAliases`). */
export function withOffset (option: Option, spelling: string, value: Value, where: string): Value {
  const offset = option.offsetAliases?.[spelling]
  if (offset === undefined) return value
  const own = (value as number) + offset
  if (inRange(option, own)) return own
  const least = (option.min ?? -Infinity) - offset
  throw new RefitError('CONFIG', `${where}: expected an integer of at least ${least}, got ${String(value)}`, {
    param: where
  })
}

/** A description of the values that an option takes. */
export function expected (option: Option): string {
  switch (option.type) {
    case 'boolean':
      return 'true or false'
    case 'integer':
      return 'an integer' + range(option)
    case 'number':
      return 'a number' + range(option)
    case 'list':
      return option.takes === undefined
        ? 'a path, or a list of paths'
        : `${option.takes.split(';', 1)[0]!.replaceAll('`', '')}, or a list of these`
    case 'choice':
      return 'one of ' + option.choices!.join(', ')
    case 'string':
      return option.takes ?? 'a string that is not empty'
  }
}

function parseBoolean (text: string, where: string): boolean {
  const word = text.trim().toLowerCase()
  if (['true', '1', 'yes', 'on'].includes(word)) return true
  if (['false', '0', 'no', 'off'].includes(word)) return false
  throw new RefitError(
    'CONFIG',
    `${where}: expected true, 1, yes or on, or false, 0, no or off, got ${JSON.stringify(text)}`,
    { param: where }
  )
}

function checkChoice (option: Option, value: string, where: string): string {
  const word = value.toLowerCase()
  const meant = option.spellings?.[word] ?? word
  if (option.choices!.includes(meant)) return meant
  const near = suggest(word, option.choices!)
  throw wrong(option, value, where, near === undefined ? '' : `; did you mean ${near}?`)
}

function inRange (option: Option, value: number): boolean {
  return Number.isFinite(value) && (option.type === 'number' || Number.isInteger(value)) &&
    value >= (option.min ?? -Infinity) && value <= (option.max ?? Infinity)
}

function range ({ min, max }: Option): string {
  if (min !== undefined && max !== undefined) return ` from ${min} to ${max}`
  if (min !== undefined) return ` of at least ${min}`
  return max === undefined ? '' : ` of at most ${max}`
}

function wrong (option: Option, value: unknown, where: string, hint = ''): RefitError {
  const got = option.secret === true ? `${typeof value} (not shown)` : JSON.stringify(value)
  // Kubernetes sets <SERVICE>_PORT for every Service that it knows.
  if (where === 'REFIT_PORT' && typeof value === 'string' && value.startsWith('tcp://')) {
    hint = '; Kubernetes sets this variable for a Service named refit: give the Service another name'
  }
  return new RefitError('CONFIG', `${where}: expected ${expected(option)}, got ${got}${hint}`, { param: where })
}
