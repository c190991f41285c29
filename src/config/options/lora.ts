import type { OptionTable } from '../option.ts'

/** Options of LoRA adapters (docs/adapters.md). */
export const LORA_OPTIONS = {
  enableLora: {
    type: 'boolean',
    default: false,
    group: 'engine',
    help: 'Serves LoRA adapters (docs/adapters.md): takes the memory of their slots at the start, and serves the ' +
      'routes that load and unload them. --lora-paths implies it.'
  },
  maxLoras: {
    type: 'integer',
    default: 4,
    min: 1,
    max: 1024,
    group: 'engine',
    offsetAliases: { 'max-loras-per-batch': -1 },
    help: 'Versions of adapters that running requests use at once. One more slot takes the next version. ' +
      "--max-loras-per-batch is SGLang's spelling, which counts the base model as one: 5 there is 4 here."
  },
  maxLoraRank: {
    type: 'integer',
    default: 64,
    min: 1,
    max: 1024,
    group: 'engine',
    help: 'Largest rank of an adapter; slots have room for it.'
  },
  maxCpuLoras: {
    type: 'integer',
    default: 16,
    min: 1,
    max: 65536,
    group: 'engine',
    aliases: ['max-loaded-loras'],
    help: 'Most adapters that are loaded at once, in slots or in host memory.'
  },
  loraTargetModules: {
    type: 'list',
    default: [],
    group: 'engine',
    value: 'NAMES',
    separator: ',',
    takes: 'last parts of module names, such as q_proj, or all or all-linear',
    help: 'Modules that adapters may change, by the last parts of their names. May be repeated.',
    unset: 'all-linear'
  },
  loraPaths: {
    type: 'list',
    default: [],
    group: 'engine',
    value: 'NAME=FOLDER',
    aliases: ['lora-modules'],
    takes: '`NAME=FOLDER`, a folder, or JSON with lora_name and lora_path',
    help: 'An adapter that is loaded at the start: NAME=FOLDER, a folder (its path is the name), or JSON with ' +
      '`lora_name`, `lora_path` and `pinned`. May be repeated.',
    unset: 'none'
  }
} as const satisfies OptionTable
