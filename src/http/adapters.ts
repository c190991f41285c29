import { Type } from 'typebox'
import type { AdapterInfo, Adapters } from '../contract/adapters.ts'
import type { ServingEngine } from '../contract/rollout-engine.ts'
import { RefitError } from '../errors.ts'
import type { Loaded } from '../updates/loaded-from.ts'
import { invalid } from './refuse.ts'
import { nullable } from './schemas.ts'

// How requests name LoRA adapters. An adapter that is not loaded is always an error: the base model would silently be
// another policy.

const MAX_SHOWN = 128
const LISTED = 20
/** SGLang's default of `model`. */
const ANY_MODEL = 'default'

/** The model that a request of OpenAI's form chooses. */
export interface ChosenModel {
  /** For replies: the adapter's name, or the served name. */
  model: string
  /** Absent for the base model. */
  adapter?: string
}

interface Server {
  engine: Pick<ServingEngine, 'adapters' | 'info'>
  loaded: Readonly<Loaded>
}

/** SGLang's field of requests. */
export const loraPathField = nullable(
  Type.Union([Type.String(), Type.Array(Type.Union([Type.String(), Type.Null()]))]),
  'Name of a LoRA adapter that is loaded; null for the base model. A list has one entry for each prompt.'
)

/** The adapter in replies, if there was one. */
export const LoraUsed = Type.Object({
  name: Type.String(),
  version: Type.Integer({ description: 'Version of the adapter that made the tokens; it grows with every load.' }),
  digest: Type.Optional(Type.String({ description: 'Checksum of its tensors (docs/adapters.md).' }))
}, { title: 'LoraUsed', description: 'The LoRA adapter of the request; absent for the base model.' })

/**
 * The adapter that `model` names: an adapter (vLLM), or `base:adapter` (SGLang), which counts more than `lora_path`.
 * With adapters enabled, other names than those of the base model are refused with 404: the adapter that they once
 * stood for may be gone. Without, there is one model, and any name means it.
 */
export function chooseModel (
  { engine: { adapters, info: { servedModelName: served, modelPath } }, loaded }: Server,
  { model, lora_path: path }: { model?: string | null, lora_path?: unknown }
): ChosenModel {
  const wanted = model == null || model === '' ? served : model
  if (adapters?.get(wanted) !== undefined) return { model: wanted, adapter: wanted }
  if (adapters === undefined) {
    if (wanted.startsWith(`${served}:`)) throw notEnabled('model')
    if (adapterOf(path) !== undefined) throw notEnabled('lora_path')
    return { model: served }
  }
  const suffix = afterBase(wanted, served)
  if (suffix !== undefined && adapters.get(suffix) !== undefined) return { model: suffix, adapter: suffix }
  if (wanted.startsWith(`${served}:`)) throw notLoaded(adapters, suffix!, 'model')
  if (![served, modelPath, loaded.modelPath, ANY_MODEL].includes(wanted)) {
    throw unknownModel(wanted, served, adapters.list())
  }
  const name = adapterOf(path)
  if (name === undefined) return { model: served }
  if (adapters.get(name) === undefined) throw notLoaded(adapters, name, 'lora_path')
  return { model: name, adapter: name }
}

/** The adapter of a prompt of /generate; undefined for the base model. */
export function loraPathOf ({ adapters }: Pick<ServingEngine, 'adapters'>, path: unknown): string | undefined {
  const name = adapterOf(path)
  if (name === undefined) return undefined
  if (adapters === undefined) throw notEnabled('lora_path')
  if (adapters.get(name) === undefined) throw notLoaded(adapters, name, 'lora_path')
  return name
}

/** SGLang's words, and its status 400. */
function notLoaded (adapters: Adapters, name: string, param: string): RefitError {
  const shown = JSON.stringify(name.slice(0, MAX_SHOWN))
  return invalid(
    param,
    `Got LoRA adapter that has never been loaded, or is unloaded: ${shown}. ${listNames(adapters.list())}`
  )
}

/** One adapter for the whole request. */
function adapterOf (value: unknown): string | undefined {
  if (!Array.isArray(value)) return typeof value === 'string' && value !== '' ? value : undefined
  const [first] = value as unknown[]
  if (value.some(other => other !== first)) {
    throw new RefitError(
      'UNSUPPORTED',
      'lora_path: different adapters for the prompts of one request: send them to /generate, or one request for each',
      { param: 'lora_path' }
    )
  }
  return adapterOf(first)
}

/** The text after the base model and a colon. The served name may have colons of its own. */
function afterBase (model: string, served: string): string | undefined {
  if (model.startsWith(`${served}:`)) return model.slice(served.length + 1)
  const colon = model.indexOf(':')
  return colon < 0 || model === served ? undefined : model.slice(colon + 1)
}

function unknownModel (wanted: string, served: string, list: readonly AdapterInfo[]): RefitError {
  return new RefitError(
    'NOT_FOUND',
    `model: there is no model ${JSON.stringify(wanted.slice(0, MAX_SHOWN))}; the base model is ${
      JSON.stringify(served)
    }. ${listNames(list)}`,
    { param: 'model' }
  )
}

function notEnabled (param: string): RefitError {
  return new RefitError(
    'UNSUPPORTED',
    `${param}: LoRA adapters are not enabled; start the server with --enable-lora (docs/adapters.md)`,
    { param }
  )
}

function listNames (list: readonly AdapterInfo[]): string {
  if (list.length === 0) return 'No LoRA adapter is loaded'
  const names = list.slice(0, LISTED).map(({ name }) => JSON.stringify(name.slice(0, MAX_SHOWN))).join(', ')
  return `LoRA adapters: ${names}${list.length > LISTED ? ` and ${list.length - LISTED} more` : ''}`
}
