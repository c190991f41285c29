import { execFileSync } from 'node:child_process'
import { mkdirSync } from 'node:fs'
import { join } from 'node:path'
import { packageRoot } from '../../src/root.ts'

let built = false

/** Runs bench/native/memory.cc (compiled on first use): what the machine itself can do. */
export function machine (...args: (string | number)[]): { bestGBs: number, medianGBs: number } {
  const binary = join(packageRoot, 'build/bench/memory')
  if (!built) {
    mkdirSync(join(packageRoot, 'build/bench'), { recursive: true })
    execFileSync('g++', ['-O3', '-march=native', '-std=c++20', '-pthread', '-o', binary, join(packageRoot, 'bench/native/memory.cc')])
    built = true
  }
  return JSON.parse(execFileSync(binary, args.map(String), { encoding: 'utf8' }))
}

/** Runs bench/python/transformers_bench.py ($REFIT_PYTHON or python3, with torch and transformers); medians in milliseconds. */
export function transformers (model: string, threads: number, ...what: ('prefill' | 'decode' | 'update')[]): Record<string, number> {
  const output = execFileSync(process.env.REFIT_PYTHON ?? 'python3', [join(packageRoot, 'bench/python/transformers_bench.py'), model, String(threads), ...what],
    { encoding: 'utf8', env: { ...process.env, OMP_NUM_THREADS: String(threads) }, stdio: ['ignore', 'pipe', 'inherit'] })
  const rows = output.trim().split('\n').map(line => JSON.parse(line) as { what: string, ms: number[] })
  return Object.fromEntries(rows.map(row => [row.what, median(row.ms)]))
}

export function median (values: number[]): number {
  const sorted = [...values].sort((a, b) => a - b)
  return sorted[sorted.length >> 1]!
}
