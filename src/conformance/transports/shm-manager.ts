import { mkdtempSync, rmSync } from 'node:fs'
import { createServer } from 'node:net'
import type { Server } from 'node:net'
import { tmpdir } from 'node:os'
import { dirname, join } from 'node:path'

/** libshm's AllocInfo: int32 pid, a byte that is 1 for a release, 60 bytes of file name, padded to 4. */
const MESSAGE_BYTES = 68
const RELEASES_AT = 4

/**
 * torch's shared-memory manager, which every torch process that opens a storage registers with. It only confirms: the
 * sender frees its memory itself.
 */
export class ShmManager {
  readonly path: string
  readonly #server: Server

  private constructor (path: string, server: Server) {
    this.path = path
    this.#server = server
  }

  static async listen (): Promise<ShmManager> {
    const path = join(mkdtempSync(join(tmpdir(), 'torch-shm-dir-')), 'manager.sock')
    const server = createServer(socket => {
      let rest = Buffer.alloc(0)
      socket.on('error', () => {})
      socket.on('data', chunk => {
        rest = Buffer.concat([rest, chunk])
        for (; rest.length >= MESSAGE_BYTES; rest = rest.subarray(MESSAGE_BYTES)) {
          // A release gets no reply.
          if (rest[RELEASES_AT] === 0) socket.write('OK')
        }
      })
    })
    await new Promise<void>((resolve, reject) => {
      server.once('error', reject)
      server.listen(path, resolve)
    })
    server.unref()
    return new ShmManager(path, server)
  }

  close (): void {
    this.#server.close()
    rmSync(dirname(this.path), { recursive: true, force: true })
  }
}
