import { readPickle } from './pickle/read.ts'
import type { PickleNames } from './pickle/read.ts'
import { describePickle, PickleBytes, PickleDict, PickleName, PickleObject } from './pickle/values.ts'
import type { PickleValue } from './pickle/values.ts'
import { protocolError } from './store/protocol.ts'

// ncclUniqueId as trainers publish it: 128 bytes, or a pickle of the ctypes structure with them (vLLM's pynccl).

export const UNIQUE_ID_BYTES = 128

const CTYPES = new PickleName('_ctypes', '_unpickle', 'call', '_unpickle')
/** Forks of vLLM keep the class in modules of their own, so any module is accepted. */
const names: PickleNames = (module, name) => {
  if (module === '_ctypes' && name === '_unpickle') return CTYPES
  return name === 'ncclUniqueId' ? new PickleName(module, name, 'value', 'ncclUniqueId') : undefined
}
const LIMITS = { bytes: 4096, memo: 64, objects: 64, items: 64, stack: 64, depth: 8, text: 512 }
const VLLM_MODULE = 'vllm.distributed.device_communicators.pynccl_wrapper'

/** Throws STORE_PROTOCOL. */
export function rawUniqueId (bytes: Uint8Array): Buffer {
  if (bytes.length !== UNIQUE_ID_BYTES) {
    throw protocolError(`an NCCL id of ${bytes.length} bytes; ${UNIQUE_ID_BYTES} expected`)
  }
  return Buffer.from(bytes)
}

/**
 * Reads what `pickle.dumps` makes of a `ncclUniqueId` or of its bytes. Throws STORE_PROTOCOL or an error of the pickle
 * reader.
 */
export function unpickleUniqueId (bytes: Uint8Array): Buffer {
  const value = readPickle(bytes, names, LIMITS)
  const found = value instanceof PickleBytes ? value : structureBytes(value)
  if (found === undefined) throw protocolError(`${describePickle(value)} where a pickled NCCL id was expected`)
  return rawUniqueId(found.view())
}

/** `_ctypes._unpickle(ncclUniqueId, ({}, bytes))`. */
function structureBytes (value: PickleValue): PickleBytes | undefined {
  if (!(value instanceof PickleObject) || value.name !== CTYPES) return undefined
  const [type, state] = value.args
  if (!(type instanceof PickleName) || type.role !== 'ncclUniqueId' || !Array.isArray(state) || state.length !== 2) {
    return undefined
  }
  const [attributes, bytes] = state
  return attributes instanceof PickleDict && attributes.size === 0 && bytes instanceof PickleBytes ? bytes : undefined
}

/** The bytes that vLLM's rank 0 puts into the store (pickle protocol 4). */
export function pickleUniqueId (id: Uint8Array): Buffer {
  const text = (value: string): Buffer[] => [Buffer.of(0x8c, value.length), Buffer.from(value), MEMOIZE]
  const body = Buffer.concat([
    ...text('_ctypes'),
    ...text('_unpickle'),
    STACK_GLOBAL,
    MEMOIZE,
    ...text(VLLM_MODULE),
    ...text('ncclUniqueId'),
    STACK_GLOBAL,
    MEMOIZE,
    Buffer.of(0x7d),
    MEMOIZE,
    Buffer.of(0x43, UNIQUE_ID_BYTES),
    rawUniqueId(id),
    MEMOIZE,
    TUPLE2,
    MEMOIZE,
    TUPLE2,
    MEMOIZE,
    Buffer.of(0x52),
    MEMOIZE,
    Buffer.of(0x2e)
  ])
  const head = Buffer.of(0x80, 4, 0x95, 0, 0, 0, 0, 0, 0, 0, 0)
  head.writeBigUInt64LE(BigInt(body.length), 3)
  return Buffer.concat([head, body])
}

const MEMOIZE = Buffer.of(0x94)
const STACK_GLOBAL = Buffer.of(0x93)
const TUPLE2 = Buffer.of(0x86)

/**
 * The address at which the first rank's NCCL waits for the others, for messages; undefined if the id has none. An
 * id begins with a u64 and a `sockaddr_in` or `sockaddr_in6` (ncclBootstrapHandle, NCCL 2.14 and later).
 */
export function uniqueIdAddress (id: Buffer): { host: string, port: number } | undefined {
  const family = id.readUInt16LE(8)
  const port = id.readUInt16BE(10)
  if (family === AF_INET) return { host: [...id.subarray(12, 16)].join('.'), port }
  if (family !== AF_INET6) return undefined
  const groups = Array.from({ length: 8 }, (_, i) => id.readUInt16BE(16 + 2 * i).toString(16))
  return { host: groups.join(':'), port }
}

const AF_INET = 2
const AF_INET6 = 10
