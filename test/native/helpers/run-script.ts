import { spawnSync } from 'node:child_process'
import { join } from 'node:path'
import { packageRoot } from '../../../src/root.ts'
import type { CoreConfig } from '../../../src/native/core-config.ts'

/** Path of the addon with fault points, for scripts in other processes and workers. */
export const FAULTY = join(packageRoot, 'build/faults/refit.node')

/** Source text of a value that JSON can't hold: typed arrays. */
export function configSource (config: CoreConfig): string {
  return JSON
    .stringify(
      config,
      (_, value) =>
        value instanceof Float64Array ? { f64: [...value] } : value instanceof Uint8Array ? { u8: [...value] } : value
    )
    .replaceAll(/\{"f64":(\[[^\]]*\])\}/g, 'Float64Array.from($1)')
    .replaceAll(/\{"u8":(\[[^\]]*\])\}/g, 'Uint8Array.from($1)')
}

export interface Ran {
  status: number | null
  signal: NodeJS.Signals | null
  stdout: string
  stderr: string
}

/** Runs CommonJS source in a process. */
export function runAlone (script: string): Ran {
  return spawnSync(process.execPath, ['-e', script], { encoding: 'utf8', timeout: 120_000 })
}

/** The same with `addon` and `config` defined. */
export function runScript (config: CoreConfig, body: string): Ran {
  return runAlone(`const addon = require(${JSON.stringify(FAULTY)}); const config = ${configSource(config)};\n${body}`)
}
