import type { PickleBytes } from '../pickle/values.ts'
import { payloadError } from './tensor.ts'

// The handle that torch's caching allocator makes for a segment (CUDACachingAllocator.cpp, shareIpcHandle). Up to torch
// 2.4 it is the 64 bytes of cudaIpcMemHandle_t; since then a version byte, a type byte and the fields of the type.

/**
 * The key to open a segment with. `key` is equal for equal segments and fit for a cache: it leaves out the padding,
 * which torch does not set. Bytes are text of one character each (latin1), which takes a third of the memory and time
 * of as many Uint8Arrays.
 */
export type IpcHandle = DeviceHandle | ExpandableHandle

/** A segment of cudaMalloc. `key` is the 64 bytes for cuIpcOpenMemHandle. */
export interface DeviceHandle {
  type: 'device'
  version: number
  key: string
}

/** Physical blocks of an expandable segment, `segmentBytes` each, to be mapped one after another. */
export interface ExpandableHandle {
  type: 'expandable'
  version: number
  key: string
  /** The sender's process id in its own PID namespace. */
  pid: number
  segmentBytes: number
  /** Descriptor numbers in the sender (then `fabric` is empty), or 64-byte fabric handles. */
  fds: number[]
  fabric: string[]
}

const LEGACY_BYTES = 64
const NEWEST_VERSION = 3
const DEVICE = 0x63
const EXPANDABLE = 0x65
const FABRIC_BYTES = 64
const FD_BYTES = 4
const MIN_SEGMENT = 2 * 1024 * 1024

/**
 * Throws TENSOR_PAYLOAD. `newer` accepts segments of cudaMalloc from versions that refit does not know: their 64 bytes
 * have never changed.
 */
export function parseIpcHandle (bytes: PickleBytes, newer = false): IpcHandle {
  const blob = bytes.latin1()
  if (blob.length === LEGACY_BYTES) return { type: 'device', version: 0, key: blob }
  if (blob.length < 2) throw payloadError(`a CUDA handle of ${blob.length} bytes`)
  const version = blob.charCodeAt(0)
  const type = blob.charCodeAt(1)
  if (version === 0 || (version > NEWEST_VERSION && !(newer && type === DEVICE))) {
    throw payloadError(
      `a CUDA handle of ${blob.length} bytes and version ${version}; ` +
        `64 bytes (torch up to 2.4) and versions 1 to ${NEWEST_VERSION} (2.5 to 2.14) are known`
    )
  }
  if (type === EXPANDABLE) return expandableHandle(version, blob)
  if (type !== DEVICE) throw payloadError(`a CUDA handle of the unknown type ${type} ('c' and 'e' are known)`)
  if (blob.length !== 2 + LEGACY_BYTES) {
    throw payloadError(`a CUDA handle of type 'c' and ${blob.length} bytes (${2 + LEGACY_BYTES} expected)`)
  }
  return { type: 'device', version, key: blob.slice(2) }
}

function expandableHandle (version: number, blob: string): ExpandableHandle {
  const start = 2 + (version >= 3 ? 32 : 24)
  const bad = (what: string): Error =>
    payloadError(`a CUDA handle of an expandable segment, version ${version}, ${blob.length} bytes: ${what}`)
  if (blob.length < start) throw bad('it is cut off')
  const bytes = Buffer.from(blob, 'latin1')
  const pid = bytes.readInt32LE(2)
  const segmentBytes = Number(bytes.readBigUInt64LE(10))
  const count = Number(bytes.readBigUInt64LE(18))
  if (pid <= 0) throw bad(`process ${pid}`)
  if (segmentBytes === 0 || segmentBytes % MIN_SEGMENT !== 0) {
    throw bad(`blocks of ${segmentBytes} bytes are no multiple of 2 MiB`)
  }
  if (count === 0) throw bad('no blocks')
  if (!Number.isSafeInteger(segmentBytes * count)) throw bad(`${count} blocks of ${segmentBytes} bytes`)
  const size = (blob.length - start) / count
  const kind = version >= 3 ? bytes.readInt32LE(26) : 0
  // Version 1 had only descriptors. Version 2 does not name its handle type, but the length shows it.
  const fds = size === FD_BYTES && kind !== 2
  if (!fds && !(size === FABRIC_BYTES && kind !== 1 && version > 1)) {
    throw bad(`${count} blocks of handle type ${kind} do not take ${blob.length - start} bytes`)
  }
  if (kind < 0 || kind > 2) throw bad(`handle type ${kind}`)
  const handle: ExpandableHandle = { type: 'expandable', version, key: '', pid, segmentBytes, fds: [], fabric: [] }
  for (let at = start; at < blob.length; at += size) {
    if (!fds) handle.fabric.push(blob.slice(at, at + FABRIC_BYTES))
    else handle.fds.push(bytes.readInt32LE(at))
  }
  if (handle.fds.some(fd => fd < 0)) throw bad('a negative descriptor')
  handle.key = `${pid}/${segmentBytes}/${fds ? handle.fds.join(',') : handle.fabric.join(',')}`
  return handle
}

/** Bytes of the handle's mapping; undefined if the handle does not contain them. */
export function mappedBytes (handle: IpcHandle): number | undefined {
  return handle.type === 'device' ? undefined : handle.segmentBytes * (handle.fds.length + handle.fabric.length)
}
