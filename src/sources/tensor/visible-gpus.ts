import { RefitError } from '../../errors.ts'
import { toGpuUuid } from '../../wire/torch/gpus.ts'

/** Fields of `CudaGpu`. */
export interface VisibleGpu {
  ordinal: number
  uuid: string
}

/** The GPUs that this process sees, to find senders' GPUs among them. */
export class VisibleGpus {
  readonly #gpus: readonly VisibleGpu[]
  readonly #known = new Map<number | string, string>()

  constructor (gpus: readonly VisibleGpu[]) {
    this.#gpus = gpus
  }

  /**
   * The UUID of a sender's GPU, as in `CudaGpu.uuid`. `device` is its UUID in lower case without a prefix, or the
   * sender's index, which is used as the index here. Throws TENSOR_PAYLOAD.
   */
  uuidOf (device: number | string): string {
    let uuid = this.#known.get(device)
    if (uuid === undefined) {
      this.#known.set(
        device,
        uuid = typeof device === 'number'
          ? this.#byNumber(device)
          : this.#byUuid(device)
      )
    }
    return uuid
  }

  #byUuid (device: string): string {
    const gpu = this.#gpus.find(({ uuid }) => toGpuUuid(uuid) === device)
    if (gpu !== undefined) return gpu.uuid
    throw new RefitError(
      'TENSOR_PAYLOAD',
      `it lies on GPU-${device}, which refit does not see (${this.#seen()}): ` +
        'run both on the same GPUs (CUDA_VISIBLE_DEVICES, docker run --gpus), or send tensors on the CPU (.cpu())'
    )
  }

  #byNumber (device: number): string {
    const gpu = this.#gpus.find(({ ordinal }) => ordinal === device)
    if (gpu !== undefined) return gpu.uuid
    throw new RefitError(
      'TENSOR_PAYLOAD',
      `it lies on a GPU that its sender counts as ${device}, and refit does not count so far (${this.#seen()}): ` +
        "send the UUIDs of GPUs, not numbers (SGLang's monkey_patch_torch_reductions does it), " +
        'or start both with the same CUDA_VISIBLE_DEVICES'
    )
  }

  #seen (): string {
    return `it sees ${this.#gpus.map(({ ordinal, uuid }) => `${ordinal}: ${uuid}`).join(', ')}`
  }
}
