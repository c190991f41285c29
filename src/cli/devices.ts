import { probeGpus } from '../engine/memory/probe-gpus.ts'
import { RefitError } from '../errors.ts'
import type { CudaGpu, CudaGpus } from '../native/devices.ts'

export const DEVICES_HELP = `Usage: refit devices [--json]

Shows the GPUs that refit can compute on, which of them reach each other's memory, the driver, and the libraries
that were found. A child process looks at the GPUs, so a driver that crashes is a message here. The exit code is 0 if a
GPU can be used, otherwise 1.

  --json   the same as one JSON object
`

/** `refit devices`. */
export async function devices (args: readonly string[]): Promise<void> {
  const unknown = args.find(argument => argument !== '--json')
  if (unknown !== undefined) {
    throw new RefitError('CONFIG', `${unknown}: unknown option; "refit devices" takes --json alone`, { param: unknown })
  }
  const found = await probeGpus()
  process.stdout.write(args.length > 0 ? devicesJson(found) : describeDevices(found))
  if (!found.gpus.some(({ error }) => error === undefined)) process.exitCode = 1
}

/** The JSON of `--json`, which lists the GPUs as `cards`. */
function devicesJson (found: CudaGpus): string {
  const fields = Object.entries(found).map(([name, value]) => [name === 'gpus' ? 'cards' : name, value])
  return JSON.stringify(Object.fromEntries(fields), null, 2) + '\n'
}

/** Text for a terminal. */
export function describeDevices (found: CudaGpus): string {
  const sections = [
    found.error === undefined ? [] : [`no GPU can be used: ${found.error}`],
    found.gpus.flatMap(describeGpu),
    found.gpus.length > 1 ? peers(found) : [],
    libraries(found)
  ]
  return sections.filter(lines => lines.length > 0).map(lines => lines.join('\n')).join('\n\n') + '\n'
}

function describeGpu (gpu: CudaGpu): string[] {
  return [
    `GPU ${gpu.ordinal}: ${gpu.name}`,
    `  ${gpu.uuid}, PCI ${gpu.pciBusId}`,
    `  compute capability ${gpu.computeCapability}, ${gpu.multiprocessors} multiprocessors, ${
      gigabytes(gpu.freeBytes)
    } of ${gigabytes(gpu.totalBytes)} free`,
    ...gpu.virtualMemory ? [] : ['  memory cannot be released and resumed (no virtual memory management)'],
    ...gpu.error === undefined ? [] : [`  cannot be used: ${gpu.error}`]
  ]
}

function libraries (found: CudaGpus): string[] {
  const driver = `driver ${found.driverVersion || 'not found'} (CUDA ${
    found.driverCuda || 'unknown'
  }), refit's library: CUDA ${found.runtimeCuda || 'not opened'}, kernels for ${found.architectures || 'none'}`
  return [
    driver,
    ...found.libraries.flatMap(({ name, path, version, tried = '' }) => {
      return path !== undefined
        ? [`${name} ${version ?? ''}: ${path}`]
        : [`${name} not found; tried`, ...tried.split('\n').map(line => `  ${line}`)]
    })
  ]
}

function peers ({ gpus, peerAccess, libraries }: CudaGpus): string[] {
  const reach = gpus.map(({ ordinal }, from) =>
    [
      ordinal,
      gpus.flatMap((gpu, to) => to !== from && peerAccess[from]?.[to] === true ? [gpu.ordinal] : [])
    ] as const
  )
  if (reach.every(([, others]) => others.length === gpus.length - 1)) {
    return ['every GPU reaches the memory of every other: ranks of --tp exchange by peer access']
  }
  const nccl = libraries.find(({ name }) => name === 'NCCL')
  return [
    ...reach.map(([ordinal, others]) =>
      `GPU ${ordinal} reaches the memory of ${others.length === 0 ? 'no other' : others.join(', ')}`
    ),
    `ranks of --tp on GPUs that all reach each other exchange by peer access, others by NCCL${
      nccl?.path === undefined ? ', which was not found' : ` ${nccl.version ?? ''}`.trimEnd()
    }`
  ]
}

function gigabytes (bytes: number): string {
  return `${(bytes / 1e9).toFixed(1)} GB`
}
