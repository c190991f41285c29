import { native } from './load-addon.ts'

/** Unit of file I/O that bypasses the page cache: offsets, lengths and addresses are multiples of it. */
export const PAGE_BYTES = 4096
/** Smallest chunk that is worth a call. The chunks that a form parser keeps for itself (a boundary) are shorter. */
const CHUNK_BYTES = 32 << 10

/**
 * Frees the memory of a chunk that came from a socket and has been copied; its length is 0 then. If the garbage
 * collector has to do it, a fast body makes it search the whole heap every few megabytes, which takes longer than
 * everything else, and the next chunk gets memory that is in no cache.
 */
export function freeChunk (chunk: Uint8Array): void {
  // A chunk that is part of a larger buffer may have other readers.
  if (
    chunk.byteLength >= CHUNK_BYTES && chunk.byteLength === chunk.buffer.byteLength &&
    chunk.buffer instanceof ArrayBuffer
  ) native().freeBuffer(chunk.buffer)
}

/** Memory that begins at a page border and has no other owner. Free it with `freeMemory`. */
export function allocatePages (bytes: number): Buffer {
  // Buffers from Node's pool share memory with others.
  const memory = Buffer.allocUnsafeSlow(bytes + PAGE_BYTES)
  const begin = (PAGE_BYTES - native().pageOffset(memory)) % PAGE_BYTES
  return memory.subarray(begin, begin + bytes)
}

/** Frees at once. The garbage collector may wait for minutes, because a buffer is a small object to it. */
export function freeMemory ({ buffer }: Buffer): void {
  native().freeBuffer(buffer as ArrayBuffer)
}
