/**
 * One option: a flag, an environment variable, a key of the config file, a line of `--help` and a row of
 * docs/configuration.md.
 */
export interface Option {
  type: 'string' | 'integer' | 'number' | 'boolean' | 'choice' | 'list'
  /** Null: not set; `unset` describes the effect. A list starts empty. */
  default: string | number | boolean | null | readonly string[]
  help: string
  /** Effect while the value is null or the list empty. */
  unset?: string
  group: 'model' | 'engine' | 'gateway' | 'server'
  /** Name of the value in `--help`. */
  value?: string
  /** Other spellings of the flag, without dashes. */
  aliases?: readonly string[]
  /** Other spellings whose integer counts differently, with the number that is added to it. */
  offsetAliases?: Readonly<Record<string, number>>
  /** Pattern of a string in lower case, and its description. */
  pattern?: RegExp
  takes?: string
  /** Separates the entries of a list in a variable (default that of paths) and, if it is set, on the command line. */
  separator?: string
  /** Accepted values of a choice, or of the entries of a list. */
  choices?: readonly string[]
  /** Other spellings of values. */
  spellings?: Readonly<Record<string, string>>
  min?: number
  max?: number
  /** Printed as *** wherever the configuration is shown. */
  secret?: boolean
}

type Base<O extends Option> = O extends { type: 'list', choices: readonly (infer C)[] } ? readonly C[] :
  O extends { choices: readonly (infer C)[] } ? C :
  O['type'] extends 'integer' | 'number' ? number :
  O['type'] extends 'boolean' ? boolean :
  O['type'] extends 'list' ? readonly string[] :
  string

/** The type of an option's value in the loaded configuration. */
export type OptionValue<O extends Option> = O['default'] extends null ? Base<O> | null : Base<O>

/** The options of one command, by key. */
export type OptionTable = Readonly<Record<string, Option>>

/** Every other spelling of its flag. */
export function aliasesOf ({ aliases = [], offsetAliases = {} }: Option): string[] {
  return [...aliases, ...Object.keys(offsetAliases)]
}

/** `servedModelName` -> `served-model-name`: the flag without its dashes, and the key of the config file. */
export function flagName (key: string): string {
  return key.replace(/[A-Z]/g, letter => '-' + letter.toLowerCase())
}

/** `servedModelName` -> `REFIT_SERVED_MODEL_NAME`. */
export function variableName (key: string): string {
  return 'REFIT_' + flagName(key).replaceAll('-', '_').toUpperCase()
}
