import { OPTIONS } from './schema.ts'
import type { Option, OptionTable } from './option.ts'
import { GATEWAY_OPTIONS } from './gateway-options.ts'
import { aliasesOf, flagName, variableName } from './option.ts'
import { GROUPS, defaultText } from './help.ts'
import { expected } from './parse-value.ts'

/**
 * The text of docs/configuration.md. `npm run docs` writes it and a test compares it. `dialects` lists the names that
 * --dialects takes, which this folder does not know.
 */
export function configurationPage (dialects: readonly string[]): string {
  const options = {
    ...OPTIONS,
    dialects: { ...OPTIONS.dialects, takes: `names out of ${dialects.join(', ')}` }
  }
  const sections = Object.entries(GROUPS).filter(([group]) => group !== 'gateway').map(([group, title]) =>
    `## ${title}\n\n${rows(options, group)}`
  )
  return `# Configuration

<!-- Written by "npm run docs" from src/config/options: change it there. -->

\`refit serve MODEL [options]\` takes each option from the first of these places that has it:

1. the command line: \`--port 8000\`, \`--port=8000\`, \`--insecure\`, \`--no-insecure\`
2. the environment: \`REFIT_PORT=8000\`; switches take true, 1, yes or on, and false, 0, no or off; an empty variable
   counts as unset
3. the JSON file that \`--config FILE\` names: \`{ "port": 8000, "model-root": ["/checkpoints"] }\`
4. the default

With a wrong type, a value out of range, or an unknown flag or key, the server does not start: it ends with exit code 2
and a message that names what is accepted. The log shows the configuration at the start, with keys as \`***\`.

${sections.join('\n')}
## The gateway

\`refit gateway\` ([gateway.md](gateway.md)) has these options, and these of the server: --host, --port (default 30080),
--api-key, --admin-api-key, --insecure, --log-level and --config.

${rows(GATEWAY_OPTIONS, 'gateway')}
## The model

MODEL is a folder, or \`org/name\` as \`hf download org/name\` left it in the local Hugging Face cache:
\`$HF_HUB_CACHE\`, else \`$HF_HOME/hub\`, else \`~/.cache/huggingface/hub\`. Nothing is ever downloaded.

Weights that are loaded by request must lie inside the folders of \`--model-root\`. Without that option they must lie
inside the folder that holds the model's folder (inside the model's folder if the former is \`/\`), or inside the
model's part of the Hugging Face cache.

## GPUs

The ranks of \`--tp\` use neighbouring GPUs, from the one that \`--device cuda:N\` (or \`--base-gpu-id N\`) names. GPUs
are numbered as the CUDA runtime numbers them: CUDA_VISIBLE_DEVICES, by index or UUID, selects and orders them.
\`refit devices\` shows them, the driver and the libraries that were found; \`/server_info\` has the UUIDs of those in
use. [cuda.md](cuda.md) explains how ranks exchange data, where libraries are looked for, and all variables.

## Exit codes

| code | meaning |
|---|---|
| 0 | ended on request |
| 1 | failed; the log has the reason |
| 2 | a flag, variable or key is wrong, or the machine does not fit it |
| 70 | a device was lost or stuck; a fatal log line names it and its requests: start the process again |

## Other variables

| variable | meaning |
|---|---|
| \`REFIT_NATIVE\` | path of the native addon, instead of the one that was built for this platform |
| \`REFIT_CUDA_LIBRARY\` | path of refit's CUDA library, if not next to the addon ([cuda.md](cuda.md)) |
| \`CUDA_VISIBLE_DEVICES\` | which GPUs are used, and in which order |
| \`HF_HUB_CACHE\`, \`HF_HOME\`, \`XDG_CACHE_HOME\` | where the Hugging Face cache is |
`
}

function rows (table: OptionTable, group: string): string {
  const lines = Object.entries<Option>(table).filter(([, option]) => option.group === group).map(([key, option]) =>
    row(key, option)
  )
  return `| flag | variable | takes | default | meaning |\n|---|---|---|---|---|\n${lines.join('\n')}\n`
}

function row (key: string, option: Option): string {
  const names = [flagName(key), ...aliasesOf(option)].map(name => `\`--${name}\``).join(' ')
  const preset = defaultText(option)
  const isLiteral = option.default !== null && !Array.isArray(option.default)
  const cells = [
    names,
    `\`${variableName(key)}\``,
    takes(option),
    preset === null ? 'off' : isLiteral ? `\`${preset}\`` : preset,
    option.help
  ]
  return `| ${cells.map(cell => cell.replaceAll('|', '\\|')).join(' | ')} |`
}

function takes (option: Option): string {
  if (option.type === 'choice') return option.choices!.map(choice => `\`${choice}\``).join(', ')
  if (option.type === 'list') return option.takes ?? 'paths; in the variable with `:` between them'
  return option.type === 'string' ? option.takes ?? 'a string' : expected(option)
}
