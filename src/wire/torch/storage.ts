import { describePickle, PickleObject } from '../pickle/values.ts'
import type { PickleBytes, PickleDict, PickleTuple, PickleValue } from '../pickle/values.ts'
import { toGpuUuid } from './gpus.ts'
import { checkCount, checkRole, toBoolean, toBytes, toSize, toTorchDType } from './fields.ts'
import { mappedBytes, parseIpcHandle } from './ipc-handle.ts'
import type { IpcHandle } from './ipc-handle.ts'
import { torchItemBytes } from './dtypes.ts'
import { payloadError } from './tensor.ts'
import type { CudaStorage, DescriptorStorage, EmptyStorage, SharedFileStorage, TensorStorage } from './tensor.ts'

// torch's NewProcessWideShmHandle: pid, a random number and, since 1.x, a count.
const SHM_NAME = /^\/torch_\d{1,10}_\d{1,10}(?:_\d{1,20})?$/
const EVENT_BYTES = 64
// torch's CUDA_IPC_REF_COUNTER_FILE_SIZE.
const SLOTS = 10_000
const MAX_SHM_NAME = 64
/** Bytes of handles that one request may compare: every tensor may name one long value of the pickle. */
const MAX_LOOKED = 2 ** 30
// The size of sun_path.
const MAX_PATH = 108
const MAX_DEVICE = 1024

export interface StorageOptions {
  /** Accept segments of cudaMalloc from versions of torch that refit does not know. */
  newerHandles?: boolean
}

const EMPTY: EmptyStorage = { kind: 'empty', bytes: 0 }

/** The storages of one request. A storage is one object, however many tensors and entries name it. */
export class StorageTable {
  /** In the order in which they were found, without empty ones. */
  readonly list: TensorStorage[] = []
  /** Tensors that were offered on several GPUs. */
  readonly offers = new Set<PickleDict>()
  readonly #newer: boolean
  #looked = 0
  /** By device and bytes. */
  readonly #handles = new Map<number | string, Map<string, IpcHandle>>()
  /** By counter file, then by slot. */
  readonly #counters = new Map<string, CounterFile>()
  // Neighbouring tensors mostly lie in one segment and use one counter file.
  #last: { device: number | string, bytes: PickleBytes, handle: IpcHandle } | undefined
  #lastCounter: CounterFile | undefined
  #lastDevice: { text: string, device: number | string } | undefined

  constructor ({ newerHandles = false }: StorageOptions = {}) {
    this.#newer = newerHandles
  }

  /**
   * Reads the 15 arguments of rebuild_cuda_tensor (torch 2.0 to 2.14; reductions.py). `gpu`: the UUID that is the
   * handle's key, because the index among the arguments counts the sender's GPUs. Throws TENSOR_PAYLOAD.
   */
  cuda (args: PickleTuple, gpu?: string): CudaStorage | EmptyStorage {
    const bytes = toSize(args[8], 'storage_size_bytes')
    if (args[7] === null || bytes === 0) return EMPTY
    const device = gpu ?? this.#device(args[6])
    const handle = this.#handle(device, toBytes(args[7], 'storage_handle'))
    const offset = toSize(args[9], 'storage_offset_bytes')
    const mapped = mappedBytes(handle)
    if (mapped !== undefined && offset + bytes > mapped) {
      throw payloadError(
        `a storage of ${bytes} bytes from byte ${offset} on does not fit the ${mapped} bytes of its handle`
      )
    }
    const counter = this.#counter(toBytes(args[11], 'ref_counter_handle'))
    const slot = toSize(args[12], 'ref_counter_offset')
    if (slot >= SLOTS) throw payloadError(`ref_counter_offset is ${slot}, and a counter file has ${SLOTS} slots`)
    const event = toEvent(args[13], toBoolean(args[14], 'event_sync_required'))
    const known = counter.storages[slot]
    if (known === undefined) {
      const storage: CudaStorage = {
        kind: 'cuda',
        device,
        handle,
        offset,
        bytes,
        counterFile: counter.file,
        counterSlot: slot,
        event
      }
      counter.storages[slot] = storage
      this.list.push(storage)
      return storage
    }
    if (known.handle !== handle || known.offset !== offset || known.bytes !== bytes) {
      throw payloadError(`slot ${slot} of the counter ${counter.file} stands for two storages`)
    }
    return known
  }

  /** Reads a storage in CPU memory: a call of rebuild_storage_filename, _fd or _empty. Throws TENSOR_PAYLOAD. */
  cpu (value: PickleValue | undefined): Exclude<TensorStorage, CudaStorage> {
    if (!(value instanceof PickleObject)) {
      throw payloadError(`its storage is ${describePickle(value)}, not one that torch rebuilds`)
    }
    if (value.seen !== undefined) return value.seen as SharedFileStorage
    const storage = readCpu(value)
    value.seen = storage
    if (storage.kind !== 'empty') this.list.push(storage)
    return storage
  }

  #device (value: PickleValue | undefined): number | string {
    if (typeof value !== 'string') return toDevice(value)
    if (this.#lastDevice?.text !== value) this.#lastDevice = { text: value, device: toDevice(value) }
    return this.#lastDevice.device
  }

  #handle (device: number | string, bytes: PickleBytes): IpcHandle {
    this.#looked += bytes.length
    if (this.#looked > MAX_LOOKED) {
      throw payloadError(
        `with its own, the CUDA handles of this request take more than ${MAX_LOOKED} bytes; send several requests`
      )
    }
    const last = this.#last
    if (last !== undefined && last.device === device && last.bytes.equals(bytes)) return last.handle
    let handles = this.#handles.get(device)
    if (handles === undefined) this.#handles.set(device, handles = new Map())
    const key = bytes.latin1()
    let handle = handles.get(key)
    if (handle === undefined) handles.set(key, handle = parseIpcHandle(bytes, this.#newer))
    this.#last = { device, bytes, handle }
    return handle
  }

  #counter (bytes: PickleBytes): CounterFile {
    if (this.#lastCounter?.bytes.equals(bytes) === true) return this.#lastCounter
    const file = toShmName(bytes, 'ref_counter_handle')
    let counter = this.#counters.get(file)
    if (counter === undefined) this.#counters.set(file, counter = { file, bytes, storages: [] })
    this.#lastCounter = counter
    return counter
  }
}

/** `storages` by slot: torch assigns slots in order. V8 makes a table of a sparse array. */
interface CounterFile {
  file: string
  bytes: PickleBytes
  storages: CudaStorage[]
}

function readCpu (value: PickleObject): Exclude<TensorStorage, CudaStorage> {
  const { name: { role }, args } = value
  switch (role) {
    case 'rebuild_storage_filename': {
      checkCount(args, role, 4, 5)
      const itemBytes = args.length === 5 ? torchItemBytes(toTorchDType(args[4]))! : 1
      const bytes = toSize(args[3], 'the size of its storage') * itemBytes
      if (!Number.isSafeInteger(bytes)) throw payloadError(`a storage of ${bytes} bytes`)
      return {
        kind: 'shared-file',
        file: toShmName(toBytes(args[2], 'its storage'), 'its storage'),
        manager: toManager(toBytes(args[1], 'the manager of its storage')),
        bytes
      }
    }
    case 'rebuild_storage_fd':
      checkCount(args, role, 3)
      return { kind: 'descriptor', ...readDupFd(args[1]), bytes: toSize(args[2], 'the size of its storage') }
    case 'rebuild_storage_empty':
      checkCount(args, role, 1)
      return EMPTY
    default:
      throw payloadError(`its storage is a ${role}`)
  }
}

/** multiprocessing.resource_sharer.DupFd: (socket, key) under `_id`. */
function readDupFd (value: PickleValue | undefined): Pick<DescriptorStorage, 'address' | 'key'> {
  const id = value instanceof PickleObject && value.name.role === 'DupFd' ? value.state?.get('_id') : undefined
  if (!Array.isArray(id) || id.length !== 2) {
    throw payloadError(`its descriptor is ${describePickle(value)} without a socket and a key`)
  }
  if (typeof id[0] !== 'string') {
    throw payloadError(`its descriptor is offered at ${describePickle(id[0])}, not at the path of a Unix socket`)
  }
  return { address: toPath(id[0]), key: toSize(id[1], 'the key of its descriptor') }
}

/** The sender's index of a GPU, or its UUID. Throws TENSOR_PAYLOAD. */
export function toDevice (value: PickleValue | undefined): number | string {
  if (typeof value === 'string') {
    const uuid = toGpuUuid(value)
    if (uuid === undefined) throw payloadError('its device is a str that is not the UUID of a GPU')
    return uuid
  }
  const device = toSize(value, 'its device')
  if (device > MAX_DEVICE) throw payloadError(`its device is ${device}`)
  return device
}

/** True for a name that torch gives to its shared memory. */
export function isShmName (name: string): boolean {
  return SHM_NAME.test(name)
}

function toShmName (bytes: PickleBytes, what: string): string {
  const name = bytes.length > MAX_SHM_NAME ? '' : bytes.latin1()
  if (!isShmName(name)) {
    throw payloadError(`${what} is not a name of torch's shared memory (/torch_<pid>_<random>_<count>)`)
  }
  return name
}

function toManager (bytes: PickleBytes): string {
  return toPath(bytes.length < MAX_PATH ? bytes.latin1() : '')
}

function toPath (path: string): string {
  if (!path.startsWith('/') || path.length >= MAX_PATH || !/^[\x20-\x7e]+$/.test(path)) {
    throw payloadError('its storage is offered at something that is not the path of a Unix socket')
  }
  return path
}

function toEvent (value: PickleValue | undefined, needed: boolean): string | null {
  const bytes = toBytes(value, 'event_handle')
  if (bytes.length !== EVENT_BYTES) throw payloadError(`event_handle has ${bytes.length} bytes, not ${EVENT_BYTES}`)
  return needed ? bytes.latin1() : null
}

/** Storage and dtype of a typed storage, or of an untyped one whose last argument is the dtype. */
export function readTypedStorage (
  value: PickleValue | undefined
): { storage: PickleValue | undefined, dtype: PickleValue | undefined } {
  if (!(value instanceof PickleObject)) {
    throw payloadError(`its storage is ${describePickle(value)}, not one that torch rebuilds`)
  }
  const { name: { role }, args } = value
  if (role === 'rebuild_storage_filename' && args.length === 5) return { storage: value, dtype: args[4] }
  if (role !== 'rebuild_typed_storage' && role !== 'rebuild_typed_storage_child') {
    throw payloadError(`its storage is a ${role} without a dtype`)
  }
  checkCount(args, role, 2)
  if (role === 'rebuild_typed_storage_child') checkRole(args[1], 'the class of its storage', 'legacy storage class')
  return { storage: args[0], dtype: args[1] }
}
