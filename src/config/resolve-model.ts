import { existsSync, readFileSync, realpathSync, statSync } from 'node:fs'
import { homedir } from 'node:os'
import { dirname, join, resolve } from 'node:path'
import type { Environment } from './parse-environment.ts'
import { RefitError } from '../errors.ts'

export interface ResolvedModel {
  /** The folder that holds config.json. */
  path: string
  /** Weights inside this folder may be loaded by request if no --model-root is given. */
  root: string
}

/**
 * Finds MODEL: a folder, or `org/name` in the local Hugging Face cache (layout of huggingface_hub:
 * models--org--name/refs/REVISION names a commit, snapshots/COMMIT holds its files). Nothing is downloaded.
 */
export function resolveModel (model: string, revision: string, environment: Environment): ResolvedModel {
  if (existsSync(model)) return fromFolder(model)
  const isName = /^[\w.-]+\/[\w.-]+$/.test(model) && !/^\.{1,2}\//.test(model)
  if (!isName) {
    throw new RefitError(
      'CONFIG',
      `MODEL: the folder ${resolve(model)} does not exist, and ${
        JSON.stringify(model)
      } is not a name of the form org/name`,
      { param: 'MODEL' }
    )
  }
  return fromCache(model, revision, environment)
}

function fromFolder (model: string): ResolvedModel {
  const path = realpathSync(model)
  if (!statSync(path).isDirectory()) {
    throw new RefitError('CONFIG', `MODEL: ${path} is a file; give the folder that holds it, with its config.json`, {
      param: 'MODEL'
    })
  }
  if (!existsSync(join(path, 'config.json'))) {
    throw new RefitError(
      'CONFIG',
      `MODEL: ${path} has no config.json; expected a model in the layout of Hugging Face`,
      { param: 'MODEL' }
    )
  }
  const parent = dirname(path)
  return { path, root: parent === '/' ? path : parent }
}

function fromCache (name: string, revision: string, environment: Environment): ResolvedModel {
  const root = join(cacheFolder(environment), 'models--' + name.replace('/', '--'))
  const suffix = revision === 'main' ? '' : ` --revision ${revision}`
  const command = `hf download ${name}${suffix}`
  if (!existsSync(root)) {
    throw new RefitError(
      'CONFIG',
      `MODEL: there is no folder ${name}, and the Hugging Face cache has no such model (${root}); ` +
        `get it with: ${command}`,
      { param: 'MODEL' }
    )
  }
  const ref = join(root, 'refs', revision)
  const isRef = !revision.split('/').includes('..') && existsSync(ref) && statSync(ref).isFile()
  const commit = isRef ? readFileSync(ref, 'utf8').trim() : revision
  const path = join(root, 'snapshots', commit)
  if (!/^[\w-]+$/.test(commit) || !existsSync(path)) {
    throw new RefitError(
      'CONFIG',
      `--revision: the Hugging Face cache has no revision ${revision} of ${name}; get it with: ${command}`,
      { param: '--revision' }
    )
  }
  if (!existsSync(join(path, 'config.json'))) {
    throw new RefitError(
      'CONFIG',
      `MODEL: ${path} has no config.json: its download did not finish; repeat it with: ${command}`,
      { param: 'MODEL' }
    )
  }
  return { path, root: realpathSync(root) }
}

function cacheFolder (environment: Environment): string {
  const home = environment.HOME ?? homedir()
  if (environment.HF_HUB_CACHE) return untilde(environment.HF_HUB_CACHE, home)
  if (environment.HF_HOME) return join(untilde(environment.HF_HOME, home), 'hub')
  return join(
    environment.XDG_CACHE_HOME ? untilde(environment.XDG_CACHE_HOME, home) : join(home, '.cache'),
    'huggingface',
    'hub'
  )
}

function untilde (path: string, home: string): string {
  return path === '~' || path.startsWith('~/') ? home + path.slice(1) : path
}
