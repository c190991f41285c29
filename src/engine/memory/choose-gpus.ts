import { RefitError } from '../../errors.ts'
import type { CudaGpu, CudaGpus } from '../../native/devices.ts'

/**
 * The first GPU that `device` names: 0 for "cuda", K for "cuda:K" or --base-gpu-id K. Null for "cpu". Throws CONFIG for
 * anything else.
 */
export function firstGpu (device: string, baseGpuId: number | null): number | null {
  const [, ordinal] = /^cuda(?::(\d{1,4}))?$/.exec(device) ?? []
  if (device === 'cpu') {
    if (baseGpuId === null) return null
    throw new RefitError('CONFIG', '--base-gpu-id: the CPU has no GPUs; add --device cuda, or leave it out', {
      param: 'base-gpu-id'
    })
  }
  if (!device.startsWith('cuda') || (device !== 'cuda' && ordinal === undefined)) {
    throw new RefitError('CONFIG', `--device: expected cpu, cuda or cuda:N, got ${JSON.stringify(device)}`, {
      param: 'device'
    })
  }
  if (ordinal !== undefined && baseGpuId !== null && Number(ordinal) !== baseGpuId) {
    throw new RefitError(
      'CONFIG',
      `--device ${device} and --base-gpu-id ${baseGpuId} name different GPUs; leave one out`,
      { param: 'device' }
    )
  }
  return ordinal === undefined ? baseGpuId ?? 0 : Number(ordinal)
}

/**
 * The GPUs of the ranks: `first` and those after it. With `share` (for tests) ranks take turns on the GPUs that exist.
 * Throws CONFIG with the reason if they do not exist or cannot compute.
 */
export function chooseGpus (found: CudaGpus, first: number, ranks: number, share = false): CudaGpu[] {
  const { gpus } = found
  if (found.error !== undefined) throw new RefitError('CONFIG', `--device cuda: ${found.error}`, { param: 'device' })
  if (first >= gpus.length) {
    throw new RefitError('CONFIG', `--device cuda:${first}: there is no GPU ${first}; ${seen(gpus)}`, {
      param: 'device'
    })
  }
  if (first + ranks > gpus.length && !share) {
    const wanted = ranks === 1 ? `GPU ${first}` : `${ranks} GPUs, ${first} to ${first + ranks - 1}`
    throw new RefitError('CONFIG', `--tp ${ranks}: it needs ${wanted}; ${seen(gpus)}`, { param: 'tp' })
  }
  const usable = gpus.slice(first, first + ranks)
  const chosen = Array.from({ length: ranks }, (_, rank) => usable[rank % usable.length]!)
  const bad = chosen.find(gpu => gpu.error !== undefined)
  if (bad !== undefined) {
    throw new RefitError(
      'CONFIG',
      `--device cuda: GPU ${bad.ordinal} (${bad.name}): ${bad.error!}`,
      { param: 'device' }
    )
  }
  return chosen
}

/** The GPU with the least free memory per rank, and that memory. It limits the size of the KV cache. */
export function fullest (gpus: readonly CudaGpu[]): { gpu: CudaGpu, freeBytes: number } {
  const rows = gpus.map(gpu => ({
    gpu,
    freeBytes: Math.floor(gpu.freeBytes / gpus.filter(other => other === gpu).length)
  }))
  return rows.reduce((least, row) => row.freeBytes < least.freeBytes ? row : least)
}

function seen (gpus: readonly CudaGpu[]): string {
  if (gpus.length === 0) return 'no GPU is visible (CUDA_VISIBLE_DEVICES hides some, if it is set)'
  const list = gpus.map(({ ordinal, name, uuid }) => `${ordinal}: ${name} ${uuid}`).join(', ')
  return `visible ${
    gpus.length === 1 ? 'is one' : `are ${gpus.length}`
  } (${list}); CUDA_VISIBLE_DEVICES chooses them, and "refit devices" shows them`
}
