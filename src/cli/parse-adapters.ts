import { resolve } from 'node:path'
import type { StartAdapter } from '../app/start-adapters.ts'
import { RefitError } from '../errors.ts'

/**
 * The adapters of `--lora-paths`: NAME=FOLDER, a folder, or JSON in SGLang's or vLLM's form. Throws CONFIG for other
 * texts and for a name that is given twice.
 */
export function parseAdapters (options: readonly string[], folder = process.cwd()): StartAdapter[] {
  const names = new Set<string>()
  return options.map(option => {
    const adapter = option.trimStart().startsWith('{') ? fromJson(option) : fromPair(option)
    if (names.has(adapter.name)) throw bad(`the name ${JSON.stringify(adapter.name)} is given twice`)
    names.add(adapter.name)
    return { ...adapter, path: resolve(folder, adapter.path) }
  })
}

function fromPair (option: string): StartAdapter {
  const equals = option.indexOf('=')
  if (equals < 0) return { name: option, path: option, pinned: false }
  const [name, path] = [option.slice(0, equals), option.slice(equals + 1)]
  if (name === '' || path === '') throw bad(`expected NAME=FOLDER, got ${JSON.stringify(option)}`)
  return { name, path, pinned: false }
}

function fromJson (option: string): StartAdapter {
  let fields: Record<string, unknown>
  try {
    fields = JSON.parse(option) as Record<string, unknown>
  } catch (cause) {
    throw bad(`${JSON.stringify(option)} is no JSON: ${(cause as Error).message}`)
  }
  const { lora_name: ofSglang, lora_path: place, name = ofSglang, path = place, pinned = false } = fields
  if (
    typeof name === 'string' && name !== '' && typeof path === 'string' && path !== '' && typeof pinned === 'boolean'
  ) {
    return { name, path, pinned }
  }
  throw bad(`expected {"lora_name": "...", "lora_path": "...", "pinned": false}, got ${option}`)
}

function bad (message: string): RefitError {
  return new RefitError('CONFIG', `--lora-paths: ${message}`, { param: '--lora-paths' })
}
