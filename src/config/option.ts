/** One option: it is a flag, an environment variable, a key of the config file, a line of `--help` and a row of docs/configuration.md. */
export interface Option {
  type: 'string' | 'integer' | 'number' | 'boolean' | 'choice' | 'list'
  /** Null: not set, and `unset` says what then happens. A list starts empty. */
  default: string | number | boolean | null | readonly string[]
  help: string
  /** What happens while the value is null or the list empty. */
  unset?: string
  group: 'model' | 'engine' | 'gateway' | 'server'
  /** Name of the value in `--help`. */
  value?: string
  /** Other spellings of the flag, without dashes. */
  aliases?: readonly string[]
  /** What a string must look like, in lower case, and the same in words. */
  pattern?: RegExp
  takes?: string
  /** Between the entries of a list in a variable (default that of paths) and, where it is set, on the command line. */
  separator?: string
  /** Accepted values of a choice. */
  choices?: readonly string[]
  /** Other spellings of values. */
  spellings?: Readonly<Record<string, string>>
  /** Values that are known but refused, with the reason and what to do instead. */
  refused?: Readonly<Record<string, string>>
  min?: number
  max?: number
  /** Shown as *** wherever the configuration is printed. */
  secret?: boolean
}

type Base<O extends Option> = O extends { choices: readonly (infer C)[] } ? C :
  O['type'] extends 'integer' | 'number' ? number :
  O['type'] extends 'boolean' ? boolean :
  O['type'] extends 'list' ? readonly string[] :
  string

/** The type of an option's value in the loaded configuration. */
export type OptionValue<O extends Option> = O['default'] extends null ? Base<O> | null : Base<O>

/** The options of one command, by key. */
export type OptionTable = Readonly<Record<string, Option>>

/** `servedModelName` -> `served-model-name`: the flag without its dashes, and the key of the config file. */
export function flagName (key: string): string {
  return key.replace(/[A-Z]/g, letter => '-' + letter.toLowerCase())
}

/** `servedModelName` -> `REFIT_SERVED_MODEL_NAME`. */
export function variableName (key: string): string {
  return 'REFIT_' + flagName(key).replaceAll('-', '_').toUpperCase()
}
