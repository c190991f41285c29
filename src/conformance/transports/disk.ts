import { mkdtempSync, rmSync } from 'node:fs'
import { basename, join } from 'node:path'
import type { Tensor } from '../checkpoint.ts'
import type { Reply } from '../http-target.ts'
import type { Server } from '../servers/server.ts'
import { writeFolder } from '../variants.ts'
import type { Variant } from '../variants.ts'
import type { SendOptions, Transport } from './transport.ts'

export interface WorkFolder {
  /** The folder on this machine. */
  path: string
  /** The same folder as the server sees it. */
  serverPath: string
  /** The model whose configuration a checkpoint needs. */
  model: string
}

/** Checkpoints in a folder that the server can read. */
export class DiskTransport implements Transport {
  readonly name = 'disk'
  missing?: string
  readonly takesParts = false
  readonly #server: Server
  readonly #work: WorkFolder
  /** Folders that hold these tensors already. */
  readonly #written: ReadonlyMap<readonly Tensor[], string>

  constructor (server: Server, work: WorkFolder, variants: readonly Variant[]) {
    this.#server = server
    this.#work = work
    this.#written = new Map(variants.map(({ tensors, folder }) => [tensors, folder]))
  }

  async send (tensors: readonly Tensor[], { label }: SendOptions = {}): Promise<Reply> {
    const written = this.#written.get(tensors)
    if (written !== undefined) return await this.load(written, label)
    return await this.withFolder(async folder => {
      writeFolder(folder, tensors, this.#work.model)
      return await this.load(folder, label)
    })
  }

  /** Loads a folder below the work folder. */
  async load (folder: string, label?: string): Promise<Reply> {
    return await this.#server.loadFolder(join(this.#work.serverPath, basename(folder)), label)
  }

  /** Runs with a new folder, and removes it. */
  async withFolder<T> (run: (folder: string) => Promise<T>): Promise<T> {
    const folder = mkdtempSync(join(this.#work.path, 'send-'))
    try {
      return await run(folder)
    } finally {
      rmSync(folder, { recursive: true, force: true })
    }
  }

  async close (): Promise<void> {}
}
