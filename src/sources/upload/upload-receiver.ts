import { tmpdir } from 'node:os'
import { freeChunk } from '../../native/host-memory.ts'
import { checkRoom } from './spool-file.ts'
import { Upload } from './upload.ts'
import type { UploadOptions } from './upload.ts'
import { Staging } from './upload-staging.ts'

export interface UploadReceiverOptions {
  /** The folder for bodies that do not fit in memory; default the system's folder for temporary files. */
  folder?: string | undefined
  /** Longest time without a byte from the client; default 60 s. */
  stallMs?: number | undefined
  /** Most memory for waiting bodies; default 192 MiB. */
  memoryBytes?: number | undefined
}

const STALL_MS = 60_000

/** The memory and settings that all uploads of one server have in common. */
export class UploadReceiver {
  readonly staging: Staging
  readonly stallMs: number
  readonly #folder: string

  constructor ({ folder, stallMs = STALL_MS, memoryBytes }: UploadReceiverOptions) {
    this.#folder = folder ?? tmpdir()
    this.stallMs = stallMs
    this.staging = new Staging(memoryBytes)
  }

  open (options: Pick<UploadOptions, 'isStream' | 'maxBytes'>): Upload {
    return new Upload({ ...options, staging: this.staging, folder: this.#folder, stallMs: this.stallMs })
  }

  /** Throws SPOOL_FAILED for a body that fits neither in memory nor in the folder. */
  async checkRoom (bytes: number): Promise<void> {
    if (bytes > this.staging.holdBytes) await checkRoom(this.#folder, bytes)
  }

  /** Frees a chunk of a body after it has been taken, if it has no other reader. */
  freeChunk (chunk: Uint8Array): void {
    freeChunk(chunk)
  }

  close (): void {
    this.staging.close()
  }
}
