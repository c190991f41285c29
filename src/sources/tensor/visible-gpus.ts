import { RefitError } from '../../errors.ts'
import { toGpuUuid } from '../../wire/torch/gpus.ts'

/** As `CudaGpu` has them. */
export interface VisibleGpu {
  ordinal: number
  uuid: string
}

/** The cards that this process sees, to find those of senders among them. */
export class VisibleGpus {
  readonly #cards: readonly VisibleGpu[]
  readonly #known = new Map<number | string, string>()

  constructor (cards: readonly VisibleGpu[]) {
    this.#cards = cards
  }

  /**
   * The UUID of a sender's card, as `CudaGpu.uuid` has it: by its UUID in lower case without a prefix, or by its number there, which is
   * taken as the number here. Throws TENSOR_PAYLOAD.
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
    const card = this.#cards.find(({ uuid }) => toGpuUuid(uuid) === device)
    if (card !== undefined) return card.uuid
    throw new RefitError(
      'TENSOR_PAYLOAD',
      `it lies on the card GPU-${device}, which refit does not see (${this.#seen()}): run both on the same cards (CUDA_VISIBLE_DEVICES, docker run --gpus), or send tensors on the CPU (.cpu())`
    )
  }

  #byNumber (device: number): string {
    const card = this.#cards.find(({ ordinal }) => ordinal === device)
    if (card !== undefined) return card.uuid
    throw new RefitError(
      'TENSOR_PAYLOAD',
      `it lies on a card that its sender counts as ${device}, and refit does not count so far (${this.#seen()}): send the UUIDs of cards, not numbers (SGLang's monkey_patch_torch_reductions does it), or start both with the same CUDA_VISIBLE_DEVICES`
    )
  }

  #seen (): string {
    return `it sees ${this.#cards.map(({ ordinal, uuid }) => `${ordinal}: ${uuid}`).join(', ')}`
  }
}
