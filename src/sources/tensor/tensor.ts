import { RefitError } from '../../errors.ts'
import type { NativeSource } from '../../native/write-job.ts'
import type { AnnouncedTensor, WeightPatch, WeightSource } from '../../contract/weight-source.ts'

/** What the thread of the shares holds for a source. */
export interface ShareHold {
  /** False once the thread has ended, and its files are closed. */
  isOpen: () => boolean
  /** The name of shared memory that went with its sender, or null. */
  findGone: () => Promise<string | null>
  /** Closes what is open and gives back the references. Called once. Never throws. */
  release: () => Promise<void>
}

export interface TensorSourceParts {
  tensors: readonly AnnouncedTensor[]
  sources: readonly NativeSource[]
  layout: 'checkpoint' | 'engine'
  patch?: WeightPatch
  accept?: WeightSource['accept']
  hold: ShareHold
  /** Called once, after it has been closed. */
  closed: () => void
}

/** Tensors in memory that a trainer shares. The sender's references are given back when it is closed: until then nothing of it may be freed. */
export class TensorSource implements WeightSource {
  readonly kind = 'tensor'
  readonly layout: 'checkpoint' | 'engine'
  readonly tensors: readonly AnnouncedTensor[]
  readonly sources: readonly NativeSource[]
  readonly patch?: WeightPatch
  readonly accept?: NonNullable<WeightSource['accept']>
  readonly #hold: ShareHold
  readonly #closed: () => void
  /** From the first byte that may be read until it is closed. */
  #isRead = false
  #isRevoked = false
  #closing: Promise<void> | undefined
  #ended: () => void = () => {}
  readonly #end = new Promise<void>(resolve => {
    this.#ended = resolve
  })

  constructor ({ tensors, sources, layout, patch, accept, hold, closed }: TensorSourceParts) {
    if (patch !== undefined) this.patch = patch
    if (accept !== undefined) this.accept = accept
    this.tensors = tensors
    this.sources = sources
    this.layout = layout
    this.#hold = hold
    this.#closed = closed
  }

  /** Senders promise not to write what they share until they are answered; nothing tells whether they do. */
  async verify (): Promise<void> {
    if (this.#isRevoked && !this.#isRead) throw new RefitError('ENGINE_CLOSED', 'the server is shutting down')
    if (!this.#hold.isOpen()) {
      throw new RefitError(
        'INTERNAL',
        'the shared memory of this request was closed before it was read: the thread that holds it has ended'
      )
    }
    this.#isRead = true
  }

  /** Reading has ended, for now: it may be verified and read again. */
  rest (): void {
    this.#isRead = false
    if (this.#isRevoked) this.#ended()
  }

  /** Whose memory is still there? Throws TENSOR_PAYLOAD where a sender has ended, INTERNAL where it is closed on this side. */
  async look (): Promise<void> {
    const gone = await this.#hold.findGone()
    if (gone !== null) throw new RefitError('TENSOR_PAYLOAD', `the sender has ended: its shared memory ${gone} is gone`)
  }

  /** Nothing of it is read from now on, but for a write under way, which is waited for. */
  async revoke (): Promise<void> {
    this.#isRevoked = true
    if (this.#isRead) await this.#end
  }

  async close (): Promise<void> {
    this.#closing ??= this.#hold.release().finally(() => {
      this.#ended()
      this.#closed()
    })
    await this.#closing
  }
}
