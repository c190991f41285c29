import { parseArgs } from 'node:util'
import type { ParseArgsConfig } from 'node:util'
import { errorMessage, RefitError } from '../errors.ts'

interface Parsed<O extends NonNullable<ParseArgsConfig['options']>> {
  args: string[]
  options: O
  allowPositionals: true
  allowNegative: true
}

/** Reads the arguments of a command that takes the URL of a server. Throws CONFIG with the command's name. */
export function parseCommand<O extends NonNullable<ParseArgsConfig['options']>> (
  command: string,
  args: readonly string[],
  options: O
): ReturnType<typeof parseArgs<Parsed<O>>> {
  try {
    return parseArgs({ args: [...args], options, allowPositionals: true, allowNegative: true })
  } catch (error) {
    throw refuse(command, errorMessage(error))
  }
}

export function readUrl (command: string, positionals: readonly string[]): string {
  const [url, ...more] = positionals
  if (url === undefined) throw refuse(command, 'needs the URL of a server, such as http://127.0.0.1:30000')
  if (more.length > 0) throw refuse(command, `takes one URL, got also ${more.join(' ')}`)
  if (!URL.canParse(url) || !/^https?:$/.test(new URL(url).protocol)) {
    throw refuse(command, `expected a URL such as http://127.0.0.1:30000, got ${JSON.stringify(url)}`)
  }
  const { username, password } = new URL(url)
  if (username !== '' || password !== '') throw refuse(command, 'the URL must not contain a name or a password')
  return url
}

/** A number of an option, or null if it was not given. */
export function readNumber (
  command: string,
  flag: string,
  text: string | undefined,
  { least, most, integer = false }: { least: number, most: number, integer?: boolean }
): number | null {
  if (text === undefined) return null
  const value = text.trim() === '' ? NaN : Number(text)
  if (value >= least && value <= most && (!integer || Number.isInteger(value))) return value
  const what = integer ? 'an integer' : 'a number'
  throw refuse(command, `${flag}: expected ${what} from ${least} to ${most}, got ${JSON.stringify(text)}`)
}

/** Keys come from a flag or, better, from the environment: other users see the arguments of a process. */
export function readKey (flag: string | undefined): string | undefined {
  return flag ?? (process.env['REFIT_API_KEY'] || undefined)
}

export function refuse (command: string, message: string): RefitError {
  return new RefitError('CONFIG', `${command}: ${message}`)
}
