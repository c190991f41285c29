/** The destination of an uploaded file's tensor data. */
export interface UploadSink {
  /**
   * Stores all of `bytes`; returns a promise if the next ones must wait. `bytes` must not change before it resolves.
   */
  write: (bytes: Uint8Array) => Promise<void> | undefined
  /** All bytes have come. Resolves once they are stored. */
  end: () => Promise<void>
  /** No more bytes will come. Releases the memory that was needed only for the transfer. */
  close: () => Promise<void>
}

/** Memory for the whole file, which belongs to the caller. */
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
