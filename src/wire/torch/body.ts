import { RefitError } from '../../errors.ts'
import { describeUnreadDType, torchWeightDType } from './dtypes.ts'
import { isOfferedBucket, readBucket } from './bucket.ts'
import { NamedTensors } from './named.ts'
import { inEntry, readPayload } from './payload.ts'
import { toGpuUuid } from './gpus.ts'
import { takeSpares } from './rebuild.ts'
import { StorageTable } from './storage.ts'
import type { StorageOptions } from './storage.ts'
import { payloadError } from './tensor.ts'
import type { TensorDescriptor, TensorStorage } from './tensor.ts'

/** The tensors of SGLang's `/update_weights_from_tensor`. */
export interface TensorRequest {
  /** `serialized_named_tensors`: one entry per tensor-parallel rank (further ones are not read), or one for all. */
  entries: ReadonlyArray<string | Uint8Array>
  /**
   * Null, `direct` and names of custom loaders stand for lists of (name, tensor); `flattened_bucket` stands for a
   * bucket.
   */
  loadFormat: string | null
  /** Tensor-parallel ranks of the engine. */
  ranks: number
  /**
   * UUID of each rank's GPU. A rank takes the handle of its own GPU if a tensor is offered on several. None: an
   * engine without GPUs.
   */
  gpus?: readonly string[]
}

export interface TensorRequestOptions extends StorageOptions {
  /** Accept tensors of bytes, integers and float64 too: custom loaders make weights of them. */
  anyDType?: boolean
  /** The tensors are those of an adapter; otherwise such tensors are refused. */
  isAdapter?: boolean
}

export interface TensorBody {
  /** Per rank, in the order of its entry. Ranks with the same tensors share one array. */
  ranks: TensorDescriptor[][]
  /** Every storage that is not empty, without duplicates: to be opened, and to be released. */
  storages: TensorStorage[]
}

export interface TensorRequestBody extends TensorBody {
  /** Storages on GPUs that no rank has: to be released, and not to be opened. */
  spares: TensorStorage[]
}

type Reader = (rank: number, gpu: string | undefined) => TensorDescriptor[]

const WHERE = 'serialized_named_tensors'

/**
 * Reads the whole request, for all ranks; nothing is opened. Throws INVALID_REQUEST (number of entries),
 * PICKLE_MALFORMED, PICKLE_REFUSED, PICKLE_LIMIT, TENSOR_PAYLOAD or UNSUPPORTED; messages name entry and tensor.
 * `findStorages` lists the storages of a refused request.
 */
export function readTensorBody (
  { entries, loadFormat, ranks, gpus = [] }: TensorRequest,
  options: TensorRequestOptions = {}
): TensorRequestBody {
  if (entries.length !== 1 && entries.length < ranks) {
    throw new RefitError(
      'INVALID_REQUEST',
      `${WHERE} has ${entries.length} entries; give one per tensor-parallel rank (${ranks}), or one for all`,
      { param: WHERE }
    )
  }
  const storages = new StorageTable(options)
  const readers: Reader[] = []
  const own = gpus.map(gpu => toGpuUuid(gpu))
  const out: TensorDescriptor[][] = []
  for (let rank = 0; rank < ranks; rank++) {
    const index = entries.length === 1 ? 0 : rank
    // Trainers repeat one text for every rank.
    const twin = entries.findIndex(entry => sameEntry(entry, entries[index]!))
    out.push(inEntry(`${WHERE}[${index}]`, () => {
      readers[twin] ??= readEntry(entries[index]!, loadFormat, storages, options)
      return readers[twin](rank, own[rank])
    }))
  }
  const spares = takeSpares(storages)
  return { ranks: out, storages: storages.list, spares }
}

function readEntry (
  entry: string | Uint8Array,
  loadFormat: string | null,
  storages: StorageTable,
  { anyDType = false, isAdapter = false }: TensorRequestOptions
): Reader {
  const root = readPayload(entry)
  if (loadFormat === 'flattened_bucket') {
    if (isOfferedBucket(root)) return (_rank, gpu) => checked(readBucket(root, storages, { gpu, isAdapter }), anyDType)
    const tensors = checked(readBucket(root, storages, { isAdapter }), anyDType)
    return () => tensors
  }
  const named = new NamedTensors(root, storages, isAdapter)
  if (named.perRank) return (rank, gpu) => checked(named.forRank(rank, gpu), anyDType)
  const tensors = checked(named.forRank(0), anyDType)
  return () => tensors
}

function checked (tensors: TensorDescriptor[], anyDType: boolean): TensorDescriptor[] {
  if (anyDType) return tensors
  for (const { name, dtype } of tensors) {
    if (torchWeightDType(dtype) === undefined) throw payloadError(describeUnreadDType(dtype), name)
  }
  return tensors
}

function sameEntry (a: string | Uint8Array, b: string | Uint8Array): boolean {
  if (typeof a === 'string' || typeof b === 'string') return a === b
  return a === b || Buffer.compare(a, b) === 0
}
