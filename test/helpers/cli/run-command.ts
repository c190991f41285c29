import type { Test } from 'tap'

export interface CommandResult {
  out: string
  err: string
  code: unknown
}

/** Runs a command of the command line in this process. Returns what it wrote and its exit code. */
export async function runCommand (
  t: Test,
  command: (args: string[]) => Promise<void>,
  ...args: string[]
): Promise<CommandResult> {
  const [stdout, stderr] = [
    t.capture(process.stdout, 'write', () => true),
    t.capture(process.stderr, 'write', () => true)
  ]
  const before = process.exitCode
  process.exitCode = 0
  try {
    await command(args)
    return {
      out: stdout().map(({ args }) => String(args[0])).join(''),
      err: stderr().map(({ args }) => String(args[0])).join(''),
      code: process.exitCode
    }
  } finally {
    process.exitCode = before
    stdout.restore()
    stderr.restore()
  }
}
