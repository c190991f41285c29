import { RefitError } from '../../errors.ts'
import type { NativeSource } from '../../native/write-job.ts'
import type {
  AnnouncedTensor,
  PatchSource,
  StoredSource,
  Transport,
  WeightPatch,
  WriteReport
} from '../../contract/weight-source.ts'

export const TENSOR: Transport = { name: 'tensor', readError: 'TENSOR_PAYLOAD' }

/** The state that the handle thread holds for a source. */
export interface HandleHold {
  /** False once the thread has ended, and its files are closed. */
  isOpen: () => boolean
  /** The name of shared memory that disappeared with its sender, or null. */
  findGone: () => Promise<string | null>
  /** Closes all open files and gives back the references. Called once. Never throws. */
  release: () => Promise<void>
}

interface SharedParts {
  tensors: readonly AnnouncedTensor[]
  hold: HandleHold
  /** Called once, after it has been closed. */
  closed: () => unknown
  accept?: SharedTensors['accept']
  explain?: SharedTensors['explain']
}

export interface TensorSourceParts extends SharedParts {
  sources: readonly NativeSource[]
  layout: 'checkpoint' | 'engine'
}

export interface TensorPatchParts extends SharedParts {
  patch: WeightPatch
}

/**
 * Tensors in a trainer's memory. `close` releases the sender's references; until then the sender must not free the
 * memory.
 */
abstract class SharedTensors {
  readonly transport = TENSOR
  readonly tensors: readonly AnnouncedTensor[]
  readonly accept?: (report: WriteReport) => void
  readonly explain?: (error: unknown) => unknown
  readonly #hold: HandleHold
  readonly #closed: () => unknown
  /** From the first byte that may be read until the source is closed. */
  #isRead = false
  #isRevoked = false
  #closing: Promise<void> | undefined
  #ended: () => void = () => {}
  readonly #end = new Promise<void>(resolve => {
    this.#ended = resolve
  })

  constructor ({ tensors, hold, closed, accept, explain }: SharedParts) {
    this.tensors = tensors
    if (accept !== undefined) this.accept = accept
    if (explain !== undefined) this.explain = explain
    this.#hold = hold
    this.#closed = closed
  }

  /** Senders promise not to write to this memory before they get the reply. refit cannot check it. */
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

  /** Reading has ended for now. The source may be verified and read again. */
  rest (): void {
    this.#isRead = false
    if (this.#isRevoked) this.#ended()
  }

  /**
   * Checks that the memory still exists. Throws TENSOR_PAYLOAD if a sender has ended, INTERNAL if it is closed on this
   * side.
   */
  async look (): Promise<void> {
    const gone = await this.#hold.findGone()
    if (gone !== null) throw new RefitError('TENSOR_PAYLOAD', `the sender has ended: its shared memory ${gone} is gone`)
  }

  /** Nothing is read from now on. Waits for a running write. */
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

/** A source of whole tensors. */
export class TensorSource extends SharedTensors implements StoredSource {
  readonly kind = 'stored'
  readonly layout: 'checkpoint' | 'engine'
  readonly sources: readonly NativeSource[]

  constructor (parts: TensorSourceParts) {
    super(parts)
    this.sources = parts.sources
    this.layout = parts.layout
  }
}

/**
 * A source of changes of elements. Positions and values have been read already; `close` releases the sender's
 * references as for tensors.
 */
export class TensorPatch extends SharedTensors implements PatchSource {
  readonly kind = 'patch'
  readonly patch: WeightPatch

  constructor (parts: TensorPatchParts) {
    super(parts)
    this.patch = parts.patch
  }
}
