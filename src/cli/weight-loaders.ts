import { resolve } from 'node:path'
import { pathToFileURL } from 'node:url'
import { RefitError } from '../errors.ts'
import type { RefitPluginOptions } from '../app/plugin.ts'

type WeightLoaders = NonNullable<RefitPluginOptions['weightLoaders']>

/**
 * Imports the modules of `--weight-loader name=./module.mjs`. Throws CONFIG if an option is no pair, its name is taken,
 * or its module cannot be loaded or exports no function.
 */
export async function loadWeightLoaders (options: readonly string[], folder = process.cwd()): Promise<WeightLoaders> {
  const loaders: Record<string, WeightLoaders[string]> = Object.create(null)
  for (const option of options) {
    const [, name, path] = /^([^=]+)=(.+)$/.exec(option) ?? []
    if (name === undefined || path === undefined) {
      throw bad(`expected NAME=FILE, such as mine=./loader.mjs, got ${JSON.stringify(option)}`)
    }
    if (name in loaders) throw bad(`the name ${JSON.stringify(name)} is given twice`)
    const file = resolve(folder, path)
    loaders[name] = await importLoader(name, file)
  }
  return loaders
}

async function importLoader (name: string, file: string): Promise<WeightLoaders[string]> {
  let module: { default?: unknown }
  try {
    module = await import(pathToFileURL(file).href) as { default?: unknown }
  } catch (cause) {
    const why = cause instanceof Error ? cause.message.split('\n', 1)[0]! : String(cause)
    throw bad(`${name}: ${file} cannot be loaded: ${why}`, cause)
  }
  if (typeof module.default === 'function') return module.default as WeightLoaders[string]
  const exported = Object.keys(module)
  throw bad(
    `${name}: ${file} has no function for its default export (it exports ${
      exported.length === 0
        ? 'nothing'
        : exported.join(', ')
    }); write "export default async function (tensors, { read }) { ... }"`
  )
}

function bad (message: string, cause?: unknown): RefitError {
  return new RefitError('CONFIG', `--weight-loader: ${message}`, {
    param: '--weight-loader',
    ...cause === undefined ? {} : { cause }
  })
}
