import { spawn } from 'node:child_process'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import type { Test } from 'tap'
import { packageRoot } from '../../src/root.ts'

export type Call = (call: string, ...args: unknown[]) => Promise<unknown>

/**
 * A process with torch's stores (test/interop/store_peer.py). It ends with the test. It runs one call after another.
 */
export function storePeer (t: Test, env: NodeJS.ProcessEnv = {}): Call {
  const child = spawn(process.env.REFIT_PYTHON ?? 'python3', [join(packageRoot, 'test/interop/store_peer.py')], {
    stdio: ['pipe', 'pipe', 'pipe'],
    env: { ...process.env, OMP_NUM_THREADS: '1', ...env }
  })
  const waiting: Array<{ resolve: (value: unknown) => void, reject: (error: Error) => void }> = []
  let errors = ''
  child.stderr.on('data', data => {
    errors += data
  })
  createInterface({ input: child.stdout }).on('line', line => {
    const answer = JSON.parse(line) as { value?: unknown, error?: string }
    const call = waiting.shift()
    if (answer.error === undefined) call?.resolve(decode(answer.value))
    else call?.reject(new Error(answer.error))
  })
  child.on('close', () => {
    for (const { reject } of waiting.splice(0)) reject(new Error(`the peer ended: ${errors.slice(-2000)}`))
  })
  t.teardown(() => {
    child.kill('SIGKILL')
  })
  return async (call, ...args) =>
    await new Promise((resolve, reject) => {
      waiting.push({ resolve, reject })
      child.stdin.write(JSON.stringify({ call, args: args.map(encode) }) + '\n')
    })
}

function encode (value: unknown): unknown {
  if (value instanceof Uint8Array) return { hex: Buffer.from(value).toString('hex') }
  return Array.isArray(value) ? value.map(encode) : value
}

function decode (value: unknown): unknown {
  if (Array.isArray(value)) return value.map(decode)
  return typeof value === 'object' && value !== null ? Buffer.from((value as { hex: string }).hex, 'hex') : value
}
