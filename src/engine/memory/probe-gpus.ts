import { spawn } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import { RefitError } from '../../errors.ts'
import { cudaLibraryPath } from '../../native/load-addon.ts'
import type { CudaGpus } from '../../native/devices.ts'

const EXTENSION = import.meta.url.endsWith('.ts') ? '.ts' : '.js'
const LONGEST_MS = 120_000

export interface ProbeOptions {
  /** Path of the child's file. */
  script?: string
  limitMs?: number
}

/**
 * Looks at this machine's CUDA in a child process: if a driver or a library crashes or hangs, the child ends and the
 * result is an error message.
 */
export async function probeGpus ({ script, limitMs = LONGEST_MS }: ProbeOptions = {}): Promise<CudaGpus> {
  // The child inherits the loader of sources, but not the inspector, whose port is taken.
  const options = process.execArgv.filter(option => !option.startsWith('--inspect'))
  const child = spawn(process.execPath, [
    ...options,
    script ?? fileURLToPath(new URL(`./probe-child${EXTENSION}`, import.meta.url))
  ], { stdio: ['ignore', 'pipe', 'pipe'] })
  const output: Buffer[] = []
  const complaints: Buffer[] = []
  child.stdout.on('data', (chunk: Buffer) => {
    output.push(chunk)
  })
  child.stderr.on('data', (chunk: Buffer) => {
    complaints.push(chunk)
  })
  let late = false
  const timer = setTimeout(() => {
    late = true
    child.kill('SIGKILL')
  }, limitMs)
  const [code, signal] = await new Promise<[number | null, NodeJS.Signals | null]>((resolve, reject) => {
    child.once('error', reject)
    child.once('close', (code, signal) => {
      resolve([code, signal])
    })
  })
    .finally(() => {
      clearTimeout(timer)
    })
  if (code === 0) return JSON.parse(Buffer.concat(output).toString()) as CudaGpus
  const how = late
    ? `did not end within ${limitMs / 1000} s`
    : signal !== null
    ? `was ended by ${signal}`
    : `failed with code ${code}`
  const lastLine = Buffer.concat(complaints).toString().trim().split('\n').at(-1) ?? ''
  throw new RefitError(
    'CONFIG',
    `a process that only looked at the GPUs ${how}${
      lastLine === '' ? '' : ` (${lastLine.slice(0, 500)})`
    }: the CUDA driver, or a library that ${cudaLibraryPath()} opens, is broken; ` +
      "see whether nvidia-smi works, and look into the kernel's log (dmesg) for NVRM and Xid",
    { param: 'device' }
  )
}
