import type { OptionValue } from './option.ts'
import { ENGINE_OPTIONS } from './options/engine.ts'
import { LORA_OPTIONS } from './options/lora.ts'
import { MODEL_OPTIONS } from './options/model.ts'
import { SERVER_OPTIONS } from './options/server.ts'

// The table of all options of `refit serve`. An option is added in a file of options/. Flags, environment variables,
// keys of the config file, defaults, types, `--help` and docs/configuration.md come from this table, and
// load-config.ts reads values by it.

export const OPTIONS = { ...MODEL_OPTIONS, ...ENGINE_OPTIONS, ...LORA_OPTIONS, ...SERVER_OPTIONS } as const

export type OptionKey = keyof typeof OPTIONS

/** Every option with its value; null if an option has no default and was not set. */
export type Config = { readonly [K in OptionKey]: OptionValue<typeof OPTIONS[K]> }
