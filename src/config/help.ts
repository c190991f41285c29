import { OPTIONS } from './schema.ts'
import { GATEWAY_OPTIONS } from './gateway-options.ts'
import type { Option, OptionTable } from './option.ts'
import { aliasesOf, flagName } from './option.ts'

export const GROUPS = { model: 'Model', engine: 'Engine', gateway: 'Engines', server: 'Server' } as const

/** `--host HOST`, `--insecure`: the flag with the name of its value. */
export function usage (key: string, option: Option): string {
  if (option.type === 'boolean') return `--${flagName(key)}`
  return `--${flagName(key)} ${
    option.value ?? (option.type === 'choice' ? option.choices!.join('|') : option.type === 'integer' ? 'N' : 'VALUE')
  }`
}

/** The default as text, or null for a switch that is off. */
export function defaultText (option: Option): string | null {
  if (option.default === null || (Array.isArray(option.default) && option.default.length === 0)) {
    return option.unset ?? null
  }
  return option.default === false ? null : String(option.default)
}

/** The text of `refit serve --help`, wrapped to `width` columns. */
export function serveHelp (width = 100): string {
  const lines = [
    'Usage: refit serve MODEL [options]',
    '',
    ...wrap(
      'MODEL is a folder with config.json and safetensors files, or a name in the local Hugging Face cache.',
      '',
      width
    ),
    ...about(width)
  ]
  return [...lines, ...sections(OPTIONS, width)].join('\n') + '\n'
}

/** The text of `refit gateway --help`. */
export function gatewayHelp (width = 100): string {
  const lines = [
    'Usage: refit gateway --engine URL [--engine URL ...] [options]',
    '',
    ...wrap(
      'One address for many engines: requests are balanced over them, and calls about weights go to all at once.',
      '',
      width
    ),
    ...about(width)
  ]
  return [...lines, ...sections(GATEWAY_OPTIONS, width)].join('\n') + '\n'
}

function about (width: number): string[] {
  return wrap(
    'Every option is also an environment variable (--log-level: REFIT_LOG_LEVEL) and a key of the ' +
      'JSON file that --config names. Flags come before variables, variables before the file.',
    '',
    width
  )
}

function sections (table: OptionTable, width: number): string[] {
  const lines: string[] = []
  for (const [group, title] of Object.entries(GROUPS)) {
    if (!Object.values<Option>(table).some(option => option.group === group)) continue
    lines.push('', `${title}:`)
    for (const [key, option] of Object.entries<Option>(table)) {
      if (option.group === group && key !== 'model') {
        lines.push(`  ${usage(key, option)}`, ...wrap(describe(option), '      ', width))
      }
    }
  }
  return lines
}

function describe (option: Option): string {
  const notes = []
  const preset = defaultText(option)
  if (preset !== null) notes.push(`default: ${preset}`)
  const aliases = aliasesOf(option)
  if (aliases.length > 0) notes.push('also: ' + aliases.map(alias => '--' + alias).join(', '))
  return option.help + (notes.length === 0 ? '' : ` (${notes.join('; ')})`)
}

function wrap (text: string, indent: string, width: number): string[] {
  const lines: string[] = []
  let line = ''
  for (const word of text.split(' ')) {
    if (line !== '' && indent.length + line.length + 1 + word.length > width) {
      lines.push(indent + line)
      line = ''
    }
    line += line === '' ? word : ' ' + word
  }
  return [...lines, indent + line]
}
