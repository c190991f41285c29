import { payloadError } from './torch/tensor.ts'

// The part of the zip format (PKWARE's APPNOTE) that torch.save writes: entries that are stored without compression,
// with their sizes in the central directory at the end. Nothing is inflated, and no name is used as a path.

const END = 0x06054b50
const ENTRY = 0x02014b50
const LOCAL = 0x04034b50
const END_BYTES = 22
const ENTRY_BYTES = 46
const LOCAL_BYTES = 30
/** The end may be followed by a comment, which torch does not write. */
const MAX_COMMENT = 1024
const ZIP64 = 0xffffffff
const MAX_ENTRIES = 65_534

/** Views of the entries' bytes, by name. Throws TENSOR_PAYLOAD. */
export function zipEntries (bytes: Uint8Array): Map<string, Uint8Array> {
  const data = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  const end = findEnd(data)
  const count = data.readUInt16LE(end + 10)
  let at = data.readUInt32LE(end + 16)
  if (count > MAX_ENTRIES || at === ZIP64) throw bad('it is a zip64 archive, of 4 GiB or more')
  const entries = new Map<string, Uint8Array>()
  for (let i = 0; i < count; i++) {
    if (at + ENTRY_BYTES > end || data.readUInt32LE(at) !== ENTRY) throw bad('its directory breaks off')
    const [method, size, nameLength, extra, comment, start] = [
      data.readUInt16LE(at + 10),
      data.readUInt32LE(at + 24),
      data.readUInt16LE(at + 28),
      data.readUInt16LE(at + 30),
      data.readUInt16LE(at + 32),
      data.readUInt32LE(at + 42)
    ]
    const name = data.toString('latin1', at + ENTRY_BYTES, at + ENTRY_BYTES + nameLength)
    if (method !== 0 || data.readUInt32LE(at + 20) !== size) throw bad('its entries are compressed')
    if (entries.has(name)) throw bad('a name comes twice')
    entries.set(name, contents(data, start, size, end))
    at += ENTRY_BYTES + nameLength + extra + comment
  }
  return entries
}

function contents (data: Buffer, start: number, size: number, end: number): Uint8Array {
  if (start + LOCAL_BYTES > end || data.readUInt32LE(start) !== LOCAL) {
    throw bad('an entry is not where its directory says')
  }
  const from = start + LOCAL_BYTES + data.readUInt16LE(start + 26) + data.readUInt16LE(start + 28)
  if (from + size > end) throw bad('an entry ends behind the directory')
  return data.subarray(from, from + size)
}

function findEnd (data: Buffer): number {
  for (let at = data.length - END_BYTES; at >= Math.max(0, data.length - END_BYTES - MAX_COMMENT); at--) {
    if (data.readUInt32LE(at) === END) return at
  }
  throw bad('it has no end of a zip archive')
}

function bad (message: string): Error {
  return payloadError(`it is no file of torch.save: ${message}`)
}
