/** Where the tensor data of an uploaded file goes. */
export interface UploadSink {
  /** Takes all of `bytes`; a promise where the next ones have to wait, until which they must stay as they are. */
  write: (bytes: Uint8Array) => Promise<void> | undefined
  /** All bytes have come: resolves once they are where they belong. */
  end: () => Promise<void>
  /** No more will come: gives back the memory that only the way there needs. */
  close: () => Promise<void>
}

/** Memory for the whole file, which stays its owner's. */
export class HeldSink implements UploadSink {
  readonly #buffer: Buffer
  #at = 0

  constructor (buffer: Buffer) {
    this.#buffer = buffer
  }

  write (bytes: Uint8Array): undefined {
    this.#buffer.set(bytes, this.#at)
    this.#at += bytes.length
  }

  async end (): Promise<void> {}
  async close (): Promise<void> {}
}
