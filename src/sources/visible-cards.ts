import { RefitError } from '../errors.ts'
import type { CudaCard, CudaCards, NativeAddon } from '../native.ts'
import { toCardUuid } from '../wire/torch-cards.ts'

/** The cards that this process sees, to find those of senders among them. Looked at once, at the first use. */
export class VisibleCards {
  readonly #addon: Pick<NativeAddon, 'cudaCards'>
  readonly #known = new Map<number | string, string>()
  #found: CudaCards | undefined

  constructor (addon: Pick<NativeAddon, 'cudaCards'>) { this.#addon = addon }

  /**
   * The UUID of a sender's card, as `CudaCard.uuid` has it: by its UUID in lower case without a prefix, or by its number there, which is
   * taken as the number here. Throws TENSOR_PAYLOAD.
   */
  uuidOf (device: number | string): string {
    let uuid = this.#known.get(device)
    if (uuid === undefined) this.#known.set(device, uuid = typeof device === 'number' ? this.#byNumber(device) : this.#byUuid(device))
    return uuid
  }

  /** Looks at them now: opening the library takes a while. */
  load (): CudaCards {
    this.#found ??= this.#addon.cudaCards()
    return this.#found
  }

  #byUuid (device: string): string {
    const card = this.#demand().find(({ uuid }) => toCardUuid(uuid) === device)
    if (card !== undefined) return card.uuid
    throw new RefitError('TENSOR_PAYLOAD', `it lies on the card GPU-${device}, which refit does not see (${this.#seen()}): run both on the same cards (CUDA_VISIBLE_DEVICES, docker run --gpus), or send tensors on the CPU (.cpu())`)
  }

  #byNumber (device: number): string {
    const card = this.#demand().find(({ ordinal }) => ordinal === device)
    if (card !== undefined) return card.uuid
    throw new RefitError('TENSOR_PAYLOAD', `it lies on a card that its sender counts as ${device}, and refit does not count so far (${this.#seen()}): send the UUIDs of cards, not numbers (SGLang's monkey_patch_torch_reductions does it), or start both with the same CUDA_VISIBLE_DEVICES`)
  }

  #demand (): readonly CudaCard[] {
    const { cards } = this.load()
    if (cards.length > 0) return cards
    throw new RefitError('TENSOR_PAYLOAD', `it lies on a card, and refit sees none: ${this.#found?.error ?? 'CUDA_VISIBLE_DEVICES hides them'}`)
  }

  #seen (): string {
    return `it sees ${this.load().cards.map(({ ordinal, uuid }) => `${ordinal}: ${uuid}`).join(', ')}`
  }
}
