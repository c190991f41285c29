import { spawnSync } from 'node:child_process'
import { readdirSync } from 'node:fs'
import { basename, join } from 'node:path'
import { packageRoot } from '../../../src/root.ts'

const compiler = process.env.CXX ?? 'g++'
export const LIBRARY = ['-shared', '-fPIC', '-fvisibility=hidden']
export const SANITIZED = ['-g', '-fsanitize=address,undefined', '-fno-sanitize-recover=all']

const tree = join(packageRoot, 'native')
const files = readdirSync(tree, { recursive: true, encoding: 'utf8' })

/** The only file of native/ with this name, in whichever folder it lies. */
function find (name: string): string {
  const found = files.filter(file => basename(file) === name)
  if (found.length !== 1) throw new Error(`native/ has ${found.length} files named ${name}: ${found.join(', ')}`)
  return join(tree, found[0]!)
}

/** Compiles files of native/, by their names, into `file` and returns its path. Throws with the compiler's output. */
export function compile (file: string, sources: readonly string[], flags: readonly string[]): string {
  const { status, stderr, error } = spawnSync(compiler, [
    '-std=c++20',
    '-Wall',
    '-Wextra',
    '-I',
    tree,
    ...flags,
    ...sources.map(find),
    '-o',
    file,
    '-pthread',
    '-ldl'
  ], { encoding: 'utf8' })
  if (status !== 0) throw new Error(`${compiler} of ${sources.join(', ')} failed: ${error?.message ?? stderr}`)
  return file
}
