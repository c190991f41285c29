import { readFile, stat } from 'node:fs/promises'
import { join } from 'node:path'
import { RefitError } from '../errors.ts'
import type { Architecture } from './architecture.ts'
import { parseModelConfig } from './parse-config.ts'

const MAX_BYTES = 4 << 20

/**
 * The architecture of a model folder, from its config.json and its generation_config.json, if any. Throws MODEL_CONFIG.
 */
export async function readArchitecture (folder: string): Promise<Architecture> {
  const config = await readJson(join(folder, 'config.json'))
  if (config === undefined) {
    throw new RefitError(
      'MODEL_CONFIG',
      `${folder} has no config.json; a model folder needs one beside its safetensors files`
    )
  }
  return parseModelConfig(config, await readJson(join(folder, 'generation_config.json')))
}

async function readJson (path: string): Promise<unknown> {
  let text: string
  try {
    const info = await stat(path)
    if (!info.isFile()) throw new RefitError('MODEL_CONFIG', `${path} is not a regular file`)
    if (info.size > MAX_BYTES) {
      throw new RefitError('MODEL_CONFIG', `${path}: ${info.size} bytes are too many (${MAX_BYTES} at most)`)
    }
    text = await readFile(path, 'utf8')
  } catch (error) {
    if (error instanceof RefitError) throw error
    const code = (error as NodeJS.ErrnoException).code
    if (code === 'ENOENT') return undefined
    throw new RefitError('MODEL_CONFIG', `${path} cannot be read (${code})`, { cause: error })
  }
  try {
    return JSON.parse(text)
  } catch (error) {
    throw new RefitError('MODEL_CONFIG', `${path} is not JSON: ${(error as Error).message}`, { cause: error })
  }
}
