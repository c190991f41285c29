import { native } from './load-addon.ts'

/** What files are read and written in past the page cache: offsets, lengths and addresses are multiples of it. */
export const PAGE_BYTES = 4096
/** Of a chunk that is worth a call; what a parser of forms keeps for itself, a boundary, is shorter. */
const CHUNK_BYTES = 32 << 10

/**
 * Gives back the memory of a chunk that came from a socket and has been copied; it has length 0 then. Left to the collector, a fast body
 * makes it search the whole heap every few megabytes, which takes longer than all else; and the next chunk finds memory that is in no cache.
 */
export function freeChunk (chunk: Uint8Array): void {
  // A part of something larger may not be its reader's alone.
  if (
    chunk.byteLength >= CHUNK_BYTES && chunk.byteLength === chunk.buffer.byteLength &&
    chunk.buffer instanceof ArrayBuffer
  ) native().freeBuffer(chunk.buffer)
}

/** Memory that begins with a page, and of which nobody else has a part. Give it back by `freeMemory`. */
export function allocatePages (bytes: number): Buffer {
  // Not of Node's pool, which other buffers share.
  const memory = Buffer.allocUnsafeSlow(bytes + PAGE_BYTES)
  const begin = (PAGE_BYTES - native().pageOffset(memory)) % PAGE_BYTES
  return memory.subarray(begin, begin + bytes)
}

/** At once: the collector may leave it for minutes, since to it a buffer is a small object. */
export function freeMemory ({ buffer }: Buffer): void {
  native().freeBuffer(buffer as ArrayBuffer)
}
