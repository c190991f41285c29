import { chmodSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import t from 'tap'
import { checkPython } from '../../bench/lib/baseline.ts'

/** Runs the check with a stand-in for Python in $REFIT_PYTHON. Returns the versions or the error. */
function check (python: string): string | Error {
  const before = process.env.REFIT_PYTHON
  process.env.REFIT_PYTHON = python
  try {
    return checkPython()
  } catch (error) {
    return error as Error
  } finally {
    if (before === undefined) delete process.env.REFIT_PYTHON
    else process.env.REFIT_PYTHON = before
  }
}

function script (folder: string, name: string, body: string): string {
  const path = join(folder, name)
  writeFileSync(path, `#!/bin/sh\n${body}\n`)
  chmodSync(path, 0o755)
  return path
}

t.test('a Python that imports all the libraries gives their versions', async t => {
  const folder = t.testdir()
  t.equal(
    check(
      script(
        folder,
        'good',
        'case "$2" in "import torch, transformers, safetensors;"*) ' +
          'echo "torch 2.13.0, transformers 5.18.0, safetensors 0.8.0";; *) exit 1;; esac'
      )
    ),
    'torch 2.13.0, transformers 5.18.0, safetensors 0.8.0'
  )
})

t.test('a Python without a library, or a missing Python, is refused with advice', async t => {
  const folder = t.testdir()
  const poor = script(
    folder,
    'poor',
    'echo "Traceback" >&2; echo "ModuleNotFoundError: No module named \'torch\'" >&2; exit 1'
  )
  for (const [python, reason] of [[poor, "No module named 'torch'"], [join(folder, 'absent'), 'ENOENT']] as const) {
    const outcome = check(python)
    const message = outcome instanceof Error ? outcome.message : ''
    for (
      const part of [
        python,
        reason,
        'REFIT_PYTHON',
        'python3 -m venv build/venv && build/venv/bin/pip install torch transformers safetensors'
      ]
    ) {
      t.ok(message.includes(part), `${part} in ${message}`)
    }
  }
})
