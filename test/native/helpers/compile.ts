import { spawnSync } from 'node:child_process'
import { join } from 'node:path'
import { packageRoot } from '../../../src/root.ts'

const compiler = process.env.CXX ?? 'g++'
export const LIBRARY = ['-shared', '-fPIC', '-fvisibility=hidden']
export const SANITIZED = ['-g', '-fsanitize=address,undefined', '-fno-sanitize-recover=all']

/** Compiles `sources` of native/ into `file`, and returns that; throws with what the compiler says. */
export function compile (file: string, sources: readonly string[], flags: readonly string[]): string {
  const { status, stderr, error } = spawnSync(compiler, [
    '-std=c++20',
    '-O1',
    '-Wall',
    '-Wextra',
    '-I',
    join(packageRoot, 'native'),
    ...flags,
    ...sources.map(source => join(packageRoot, 'native', source)),
    '-o',
    file,
    '-pthread',
    '-ldl'
  ], { encoding: 'utf8' })
  if (status !== 0) throw new Error(`${compiler} of ${sources.join(', ')} failed: ${error?.message ?? stderr}`)
  return file
}
