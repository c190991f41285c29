import { existsSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'

/** The package's folder. Sources and compiled files lie at different depths, so it is searched for. */
export const packageRoot = findRoot(dirname(fileURLToPath(import.meta.url)))

function findRoot (from: string): string {
  if (existsSync(join(from, 'package.json')) && existsSync(join(from, 'native'))) return from
  const parent = dirname(from)
  if (parent === from) throw new Error('refit: its package.json was not found above ' + fileURLToPath(import.meta.url))
  return findRoot(parent)
}
