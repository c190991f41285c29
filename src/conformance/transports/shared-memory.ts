import { closeSync, existsSync, ftruncateSync, openSync, readSync, unlinkSync, writeSync } from 'node:fs'

/** Bytes before the data: libshm's reference count. */
const HEADER = 64
let made = 0

/** A file of shared memory as torch's file_system strategy makes it. */
export class SharedMemory {
  /** `/torch_...` */
  readonly name = `/torch_${process.pid}_${Math.floor(Math.random() * 1e9)}_${made++}`
  readonly path = `/dev/shm${this.name}`
  readonly bytes: number
  readonly #fd: number

  /** `count`: the references, the sender's own included. */
  constructor (data: Uint8Array, count: number) {
    this.bytes = data.length
    this.#fd = openSync(this.path, 'wx+', 0o600)
    const head = Buffer.alloc(HEADER)
    head.writeInt32LE(count)
    writeSync(this.#fd, head, 0, HEADER, 0)
    this.write(data)
  }

  write (data: Uint8Array): void {
    for (let at = 0; at < data.length;) {
      at += writeSync(this.#fd, data, at, Math.min(data.length - at, 1 << 30), HEADER + at)
    }
  }

  /** References that are left. */
  count (): number {
    const head = Buffer.alloc(4)
    readSync(this.#fd, head, 0, 4, 0)
    return head.readInt32LE()
  }

  exists (): boolean {
    return existsSync(this.path)
  }

  /** Cuts the file, whose header has 64 bytes. */
  truncate (fileBytes: number): void {
    ftruncateSync(this.#fd, fileBytes)
  }

  /** Removes the name; who has opened it keeps it. */
  unlink (): void {
    if (this.exists()) unlinkSync(this.path)
  }

  close (): void {
    closeSync(this.#fd)
    this.unlink()
  }
}
