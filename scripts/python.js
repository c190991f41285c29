import { spawnSync } from 'node:child_process'
import { join } from 'node:path'

/** The interpreter of tests against real libraries: $REFIT_PYTHON, else that of build/venv. Ends the program, in words, where it lacks some. */
export function pythonWith (libraries, script) {
  const python = process.env.REFIT_PYTHON ?? join(process.cwd(), 'build', 'venv', 'bin', 'python')
  if (spawnSync(python, ['-c', `import ${libraries.join(', ')}`], { stdio: 'inherit' }).status === 0) return python
  console.error(
    `npm run ${script}: ${python} does not have ${
      libraries.join(' ')
    }. Name another one in REFIT_PYTHON, or make it:\n` +
      `  python3 -m venv build/venv && build/venv/bin/pip install ${libraries.join(' ')}`
  )
  process.exit(1)
}
