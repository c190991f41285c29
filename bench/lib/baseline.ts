import { execFileSync, spawn, spawnSync } from 'node:child_process'
import { existsSync, mkdirSync } from 'node:fs'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { packageRoot } from '../../src/root.ts'

let built = ''

// bench/native/memory.cc, compiled on first use.
function memory (): string {
  if (built !== '') return built
  const binary = join(packageRoot, 'build/bench/memory')
  mkdirSync(join(packageRoot, 'build/bench'), { recursive: true })
  execFileSync('g++', [
    '-O3',
    '-march=native',
    '-std=c++20',
    '-pthread',
    '-o',
    binary,
    join(packageRoot, 'bench/native/memory.cc')
  ])
  return (built = binary)
}

/** The machine's own limits. */
export function machine (...args: (string | number)[]): { bestGBs: number, medianGBs: number } {
  return JSON.parse(execFileSync(memory(), args.map(String), { encoding: 'utf8' }))
}

/**
 * Versions of the libraries in the Python of the comparisons. Throws if one is missing. Call it at the start of a
 * program, because the comparisons run after minutes of work.
 */
export function checkPython (): string {
  const name = python()
  const libraries = 'torch transformers safetensors'
  const code = `import ${libraries.replaceAll(' ', ', ')}; print(*(f"{m.__name__} {m.__version__}" for m in (${
    libraries.replaceAll(' ', ', ')
  })), sep=", ")`
  const { status, stdout, stderr, error } = spawnSync(name, ['-c', code], { encoding: 'utf8' })
  if (status === 0) return stdout.trim()
  const reason = error?.message ?? stderr.trim().split('\n').at(-1)
  throw new Error(
    `${name} does not have ${libraries} (${reason}). Name another one in REFIT_PYTHON, or make it:\n` +
      `  python3 -m venv build/venv && build/venv/bin/pip install ${libraries}`
  )
}

/** $REFIT_PYTHON, else the project's own environment, else the system's Python. */
export function python (): string {
  const own = join(packageRoot, 'build/venv/bin/python')
  return process.env.REFIT_PYTHON ?? (existsSync(own) ? own : 'python3')
}

/**
 * A process that does the same work as refit for a folder or file: `turn(path)` returns its milliseconds.
 */
export interface Rival {
  turn: (path: string) => Promise<number>
  end: () => void
}

/** A Python process that holds the same model and updates it from a folder. */
export function pythonUpdates (model: string, threads: number): Promise<Rival> {
  return rival(python(), [join(packageRoot, 'bench/python/transformers_bench.py'), model, String(threads), 'turns'], {
    OMP_NUM_THREADS: String(threads)
  })
}

/** A process that reads a file, no longer than `longest`, into memory that is faulted in. */
export function plainReads (longest: string, threads: number): Promise<Rival> {
  return rival(memory(), ['turns', String(threads), longest])
}

async function rival (command: string, args: string[], env: Record<string, string> = {}): Promise<Rival> {
  const child = spawn(command, args, { env: { ...process.env, ...env }, stdio: ['pipe', 'pipe', 'inherit'] })
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]()
  const next = async (): Promise<number> => {
    const { value, done } = await lines.next()
    if (done === true) throw new Error(`${command} has ended`)
    return (JSON.parse(value) as { ms: number[] }).ms[0] ?? 0
  }
  await next()
  return {
    turn: async (path) => {
      child.stdin.write(`${path}\n`)
      return await next()
    },
    end: () => {
      child.stdin.end()
    }
  }
}

/** Runs bench/python/transformers_bench.py (in the Python of `checkPython`); medians in milliseconds. */
export function transformers (
  model: string,
  threads: number,
  ...what: ('prefill' | 'decode')[]
): Record<string, number> {
  const output = execFileSync(python(), [
    join(packageRoot, 'bench/python/transformers_bench.py'),
    model,
    String(threads),
    ...what
  ], {
    encoding: 'utf8',
    env: { ...process.env, OMP_NUM_THREADS: String(threads) },
    stdio: ['ignore', 'pipe', 'inherit']
  })
  const rows = output.trim().split('\n').map(line => JSON.parse(line) as { what: string, ms: number[] })
  return Object.fromEntries(rows.map(row => [row.what, median(row.ms)]))
}

export function median (values: number[]): number {
  const sorted = [...values].sort((a, b) => a - b)
  return sorted[sorted.length >> 1]!
}
