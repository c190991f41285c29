import { createContext, Script } from 'node:vm'
import { errorMessage, RefitError } from '../errors.ts'

// adapter_config.json of PEFT (tuners/lora/config.py). Fields that change the result and are not computed here are
// refused by name; fields of training alone are ignored.

/** The part of adapter_config.json that the result depends on. */
export interface AdapterConfig {
  /** Rank and scale of a module: alpha / r, or alpha / sqrt(r) with use_rslora. */
  shapeOf: (module: string) => { rank: number, scale: number }
  /** Whether the configuration says that a module has an adapter; null if it does not say. */
  targets: ((module: string) => boolean) | null
}

/** A regular expression of a config may take this long for all names together. */
const REGEX_MS = 200
const MAX_PATTERN = 1024
const MAX_ENTRIES = 4096
const MAX_NUMBER = 1e6
/** Values of init_lora_weights that leave the base weights as they are. */
const PLAIN_INIT = new Set(['gaussian', 'eva', 'orthogonal'])
/** Fields that change the result, and the values at which they do not. */
const REFUSED: Readonly<Record<string, readonly unknown[]>> = {
  use_dora: [false],
  lora_bias: [false],
  bias: ['none'],
  modules_to_save: [],
  trainable_token_indices: [],
  layer_replication: [],
  alora_invocation_tokens: [],
  use_qalora: [false],
  use_bdlora: [false],
  arrow_config: [],
  kasa_config: [],
  velora_config: [],
  monteclora_config: []
}

/**
 * Reads the parsed content of adapter_config.json. `names`: the model's modules; a pattern tests them all at once,
 * which is much faster than one after another. Throws ADAPTER_REFUSED.
 */
export function parseAdapterConfig (json: unknown, names: Iterable<string> = []): AdapterConfig {
  const modules = [...names]
  if (typeof json !== 'object' || json === null || Array.isArray(json)) {
    throw refused('peft_config', `expected an object as in adapter_config.json, got ${typeName(json)}`)
  }
  const fields = json as Record<string, unknown>
  const type = fields.peft_type ?? 'LORA'
  if (typeof type !== 'string' || type.toUpperCase().replace(/^PEFTTYPE\./, '') !== 'LORA') {
    throw refused('peft_type', `expected "LORA", got ${JSON.stringify(type)}; other methods are not computed`)
  }
  for (const [name, harmless] of Object.entries(REFUSED)) {
    const value = fields[name]
    if (isEmpty(value) || harmless.includes(value)) continue
    throw refused(
      name,
      `${JSON.stringify(value)?.slice(0, 200)} changes the result and is not computed; ` +
        'merge the adapter into the weights and send those, or train without it'
    )
  }
  checkInit(fields.init_lora_weights)
  const rank = positive(fields, 'r', 8, true)
  const alpha = positive(fields, 'lora_alpha', 8)
  const isRs = boolean(fields, 'use_rslora')
  const rankOf = patterns(fields, 'rank_pattern', true, modules)
  const alphaOf = patterns(fields, 'alpha_pattern', false, modules)
  return {
    shapeOf: module => {
      const r = rankOf(module) ?? rank
      const a = alphaOf(module) ?? alpha
      return { rank: r, scale: a / (isRs ? Math.sqrt(r) : r) }
    },
    targets: targetsOf(fields, modules)
  }
}

function checkInit (value: unknown): void {
  if (isEmpty(value) || typeof value === 'boolean') return
  if (typeof value === 'string' && PLAIN_INIT.has(value.toLowerCase())) return
  throw refused(
    'init_lora_weights',
    `${JSON.stringify(value)?.slice(0, 100)} changes the base weights, which this server does not have; save the ` +
      'adapter with path_initial_model_for_weight_conversion (PEFT), or train with init_lora_weights true'
  )
}

function targetsOf (fields: Record<string, unknown>, modules: readonly string[]): AdapterConfig['targets'] {
  const { target_modules: target, exclude_modules: excluded } = fields
  if (isEmpty(target) || !isEmpty(fields.target_parameters)) return null
  const isTarget = typeof target === 'string' && target.toLowerCase() === 'all-linear'
    ? (module: string) => module !== 'lm_head' && !module.endsWith('embed_tokens')
    : matcher('target_modules', target, modules)
  const isExcluded = isEmpty(excluded) ? () => false : matcher('exclude_modules', excluded, modules)
  const layers = fields.layers_to_transform
  if (!isEmpty(layers) && !(Number.isInteger(layers) || (Array.isArray(layers) && layers.every(Number.isInteger)))) {
    throw refused('layers_to_transform', `expected a number or a list of numbers, got ${typeName(layers)}`)
  }
  const isLayer = isEmpty(layers) ? () => true : layerTest([layers].flat() as number[])
  return module => isTarget(module) && !isExcluded(module) && isLayer(module)
}

function layerTest (layers: readonly number[]): (module: string) => boolean {
  const wanted = new Set(layers)
  return module => {
    const [, layer] = /\.(\d+)\./.exec(module) ?? []
    return layer !== undefined && wanted.has(Number(layer))
  }
}

/** A list of whole names or ends of names, or a regular expression for whole names. */
function matcher (field: string, value: unknown, modules: readonly string[]): (module: string) => boolean {
  if (typeof value === 'string') {
    const test = regex(field, value, modules)
    return module => test(module)
  }
  if (!Array.isArray(value) || value.length > MAX_ENTRIES || !value.every(name => typeof name === 'string')) {
    throw refused(
      field,
      `expected a list of at most ${MAX_ENTRIES} names or a regular expression, got ${typeName(value)}`
    )
  }
  const names = value as string[]
  return module => names.some(name => module === name || module.endsWith(`.${name}`))
}

/** `rank_pattern` and `alpha_pattern`: the first key that fits a module's name or an end of it, in the file's order. */
function patterns (
  fields: Record<string, unknown>,
  field: string,
  isInteger: boolean,
  modules: readonly string[]
): (module: string) => number | undefined {
  const value = fields[field]
  if (isEmpty(value)) return () => undefined
  if (typeof value !== 'object' || Array.isArray(value)) {
    throw refused(field, `expected an object of numbers, got ${typeName(value)}`)
  }
  const entries = Object.entries(value as Record<string, unknown>)
  if (entries.length > MAX_ENTRIES) throw refused(field, `${entries.length} entries; at most ${MAX_ENTRIES} are read`)
  const tests = entries.map(([key]) => {
    const number = positive(value as Record<string, unknown>, key, 0, isInteger, field)
    return [
      /^[\w.]+$/.test(key) ? endsWith(key) : regex(field, `(?:.*\\.)?(?:${key.replace(/^\^/, '')})`, modules),
      number
    ] as const
  })
  return module => tests.find(([test]) => test(module))?.[1]
}

function endsWith (key: string): (module: string) => boolean {
  return module => module === key || module.endsWith(`.${key}`)
}

/**
 * A test of whole names by a pattern of Python's re. It runs in a context with a time limit, because a pattern from a
 * file may backtrack without end.
 */
function regex (field: string, pattern: string, modules: readonly string[]): (module: string) => boolean {
  if (pattern.length > MAX_PATTERN) {
    throw refused(field, `a pattern has ${pattern.length} characters; at most ${MAX_PATTERN}`)
  }
  const context = createContext({ pattern: null, names: [] as readonly string[] })
  const source = pattern.replaceAll('(?P<', '(?<').replace(/\\Z$/, '$')
  try {
    context.pattern = new RegExp(`^(?:${source})$`)
  } catch (error) {
    throw refused(field, `${JSON.stringify(pattern.slice(0, 200))} is no regular expression: ${errorMessage(error)}`)
  }
  const script = new Script('names.filter(name => pattern.test(name))')
  let left = REGEX_MS
  const fitting = (names: readonly string[]): string[] => {
    context.names = names
    const started = performance.now()
    try {
      return script.runInContext(context, { timeout: Math.max(1, Math.ceil(left)) }) as string[]
    } catch {
      throw refused(field, `the pattern ${JSON.stringify(pattern.slice(0, 200))} takes too long; write a simpler one`)
    } finally {
      left -= performance.now() - started
    }
  }
  const known = new Set(modules)
  let fits: Set<string> | undefined
  return module => {
    if (!known.has(module)) return fitting([module]).length > 0
    fits ??= new Set(fitting(modules))
    return fits.has(module)
  }
}

function positive (
  fields: Record<string, unknown>,
  name: string,
  fallback: number,
  isInteger = false,
  parent?: string
): number {
  const value = fields[name] ?? fallback
  const isGood = typeof value === 'number' && value > 0 && value <= MAX_NUMBER &&
    (!isInteger || Number.isInteger(value))
  if (isGood) return value
  const kind = isInteger ? 'a whole number' : 'a number'
  throw refused(
    parent ?? name,
    `${parent === undefined ? '' : `${JSON.stringify(name.slice(0, 100))}: `}expected ${kind} above 0 and up to ` +
      `${MAX_NUMBER}, got ${JSON.stringify(value)?.slice(0, 100)}`
  )
}

function boolean (fields: Record<string, unknown>, name: string): boolean {
  const value = fields[name] ?? false
  if (typeof value === 'boolean') return value
  throw refused(name, `expected true or false, got ${JSON.stringify(value)?.slice(0, 100)}`)
}

function isEmpty (value: unknown): boolean {
  if (value === undefined || value === null) return true
  if (Array.isArray(value)) return value.length === 0
  return typeof value === 'object' && Object.keys(value).length === 0
}

function typeName (value: unknown): string {
  return value === null ? 'null' : Array.isArray(value) ? 'a list' : `a ${typeof value}`
}

function refused (field: string, message: string): RefitError {
  return new RefitError('ADAPTER_REFUSED', `adapter_config.json: ${field}: ${message}`, { param: field })
}
