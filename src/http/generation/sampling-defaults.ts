import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import { RefitError } from '../../errors.ts'

/**
 * The values of /v1/completions and /v1/chat/completions for sampling parameters that a request leaves out, as vLLM and
 * SGLang take them from a model's generation_config.json.
 */
export type SamplingDefaults = Readonly<Partial<Record<typeof FIELDS[number], number>>>

const FIELDS = ['temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty'] as const

/** Empty if the folder has no such file. Throws MODEL_CONFIG for a value that is no number. */
export async function readSamplingDefaults (folder: string): Promise<SamplingDefaults> {
  const path = join(folder, 'generation_config.json')
  const text = await readFile(path, 'utf8').catch(() => '{}')
  let config: Record<string, unknown>
  try {
    config = JSON.parse(text) as Record<string, unknown>
  } catch (error) {
    throw new RefitError('MODEL_CONFIG', `${path} is no JSON: ${(error as Error).message}`, { cause: error })
  }
  const given = FIELDS.filter(field => (config[field] ?? null) !== null)
  return Object.fromEntries(given.map(field => {
    const value = config[field]
    if (typeof value === 'number' && Number.isFinite(value)) return [field, value]
    throw new RefitError(
      'MODEL_CONFIG',
      `${path}: ${field}: expected a number, got ${JSON.stringify(value)}; ` +
        'correct the file, or start with --sampling-defaults openai'
    )
  }))
}
