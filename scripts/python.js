import { spawnSync } from 'node:child_process'
import { join } from 'node:path'

/**
 * The Python for tests against real libraries: $REFIT_PYTHON, else the one in build/venv. Ends the program with an
 * error if it lacks one of the libraries.
 */
export function pythonWith (libraries, script) {
  const python = process.env.REFIT_PYTHON ?? join(process.cwd(), 'build', 'venv', 'bin', 'python')
  // sys.exit(0) succeeds, and sys.exit('') would not.
  const probe = 'import importlib.util as u, sys; ' +
    "sys.exit(', '.join(name for name in sys.argv[1:] if u.find_spec(name) is None) or 0)"
  const { status, stderr, error } = spawnSync(python, ['-c', probe, ...libraries], { encoding: 'utf8' })
  // Python compiles torch and transformers again in each process that may not keep the result: seconds of CPU.
  delete process.env.PYTHONDONTWRITEBYTECODE
  if (status === 0) return python
  console.error(
    `npm run ${script}: ${python} lacks ${error?.message ?? stderr.trim()}. ` +
      'Name another Python in REFIT_PYTHON, or make it:\n' +
      '  python3 -m venv build/venv && build/venv/bin/pip install -r test/interop/requirements.txt'
  )
  process.exit(1)
}
