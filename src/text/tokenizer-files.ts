import { readFile, readdir } from 'node:fs/promises'
import { join } from 'node:path'
import { RefitError } from '../errors.ts'

/** The tokenizer and template files of a model folder. */
export interface TokenizerFiles {
  dir: string
  /** tokenizer.json */
  tokenizer: Record<string, unknown>
  /** tokenizer_config.json, `{}` if it does not exist. */
  config: Record<string, unknown>
  /** Chat templates by name; a single one is `default`. */
  templates: Map<string, string>
  /** The texts of both files, for a second tokenizer that does not depend on what happens to the files. */
  texts: { tokenizer: string, config: string }
}

/** Reads the files of a model folder; null if it has no tokenizer.json. */
export async function readTokenizerFiles (dir: string): Promise<TokenizerFiles | null> {
  const [tokenizerPath, configPath] = [join(dir, 'tokenizer.json'), join(dir, 'tokenizer_config.json')]
  const tokenizer = await readText(tokenizerPath)
  if (tokenizer === null) return null
  const texts = { tokenizer, config: await readText(configPath) ?? '{}' }
  const config = parseObject(configPath, texts.config)
  return {
    dir,
    tokenizer: parseObject(tokenizerPath, tokenizer),
    config,
    templates: await readTemplates(dir, config),
    texts
  }
}

async function readTemplates (dir: string, config: Record<string, unknown>): Promise<Map<string, string>> {
  const templates = new Map<string, string>()
  const inConfig = config['chat_template']
  if (typeof inConfig === 'string') {
    templates.set('default', inConfig)
  } else if (Array.isArray(inConfig)) {
    for (const entry of inConfig as { name?: unknown, template?: unknown }[]) {
      if (typeof entry?.name === 'string' && typeof entry.template === 'string') {
        templates.set(
          entry.name,
          entry.template
        )
      }
    }
  }
  // transformers 5 writes templates next to the configuration, and prefers them there.
  const single = await readText(join(dir, 'chat_template.jinja'))
  if (single !== null) templates.set('default', single)
  const more = join(dir, 'chat_templates')
  for (const file of await list(more)) {
    if (!file.endsWith('.jinja')) continue
    const text = await readText(join(more, file))
    if (text !== null) templates.set(file.slice(0, -'.jinja'.length), text)
  }
  return templates
}

function parseObject (path: string, text: string): Record<string, unknown> {
  let value: unknown
  try {
    value = JSON.parse(text)
  } catch (cause) {
    throw new RefitError('MODEL_CONFIG', `${path} is not JSON: ${(cause as Error).message}`, { cause })
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    throw new RefitError('MODEL_CONFIG', `${path} must hold a JSON object`)
  }
  return value as Record<string, unknown>
}

async function readText (path: string): Promise<string | null> {
  try {
    return await readFile(path, 'utf8')
  } catch (cause) {
    if (isAbsent(cause)) return null
    throw new RefitError('MODEL_CONFIG', `${path} cannot be read: ${(cause as Error).message}`, { cause })
  }
}

async function list (dir: string): Promise<string[]> {
  try {
    return (await readdir(dir)).sort()
  } catch (cause) {
    if (isAbsent(cause)) return []
    throw new RefitError('MODEL_CONFIG', `${dir} cannot be read: ${(cause as Error).message}`, { cause })
  }
}

function isAbsent (cause: unknown): boolean {
  const code = (cause as NodeJS.ErrnoException).code
  return code === 'ENOENT' || code === 'ENOTDIR'
}
