import { RefitError } from '../errors.ts'
import type { AnnouncedTensor, WeightSource } from '../weights/source.ts'

/** Tensors in memory that a trainer shares. The sender's references are given back when it is closed: until then nothing of it may be freed. */
export class TensorSource implements WeightSource {
  readonly kind = 'tensor'
  readonly layout: 'checkpoint' | 'engine'
  readonly tensors: readonly AnnouncedTensor[]
  readonly sources: ReadonlyArray<{ fd: number }>
  readonly #isOpen: () => boolean
  readonly #release: () => Promise<void>
  #closing: Promise<void> | undefined

  constructor (tensors: readonly AnnouncedTensor[], fds: readonly number[], layout: 'checkpoint' | 'engine', isOpen: () => boolean, release: () => Promise<void>) {
    this.tensors = tensors
    this.sources = fds.map(fd => ({ fd }))
    this.layout = layout
    this.#isOpen = isOpen
    this.#release = release
  }

  /** Senders promise not to write what they share until they are answered; nothing tells whether they do. */
  async verify (): Promise<void> {
    if (!this.#isOpen()) throw new RefitError('INTERNAL', 'the shared memory of this request was closed before it was read: the thread that holds it has ended')
  }

  async close (): Promise<void> {
    this.#closing ??= this.#release()
    await this.#closing
  }
}
