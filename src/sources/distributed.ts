import { RefitError } from '../errors.ts'
import { layOutPieces } from '../groups/pieces.ts'
import { nameRange } from '../groups/group-words.ts'
import type { Receipt } from '../groups/receipt.ts'
import type { WeightGroups } from '../groups/weight-groups.ts'
import { describeUnreadDType, torchWeightDType } from '../wire/torch-dtypes.ts'
import type { AnnouncedTensor, WeightSource } from '../weights/source.ts'
import { measureTensors } from './measure-tensors.ts'
import type { MeasuredTensor } from './measure-tensors.ts'

export interface DistributedRequest {
  names: readonly string[]
  dtypes: readonly string[]
  shapes: readonly (readonly number[])[]
  groupName: string
  /** "flattened_bucket": one broadcast of the tensors' bytes, one after another. Else one for each tensor, in order. */
  loadFormat: string | null
}

/** Tensors that rank 0 of a process group broadcasts. Close it, whatever happens: what nobody took is received and dropped. */
export interface DistributedSource extends WeightSource {
  /** The error that it was refused by or failed with, and what became of the bytes that were announced. */
  noted: (error: unknown) => unknown
}

interface Announced { tensors: MeasuredTensor[], sizes: number[], stream: Receipt, isBucket: boolean, at: number[] }

/** Makes sources of what trainers announce to send through groups. */
export class DistributedReceiver {
  readonly #groups: WeightGroups
  readonly #bucketBytes: number

  /** `bucketBytes`: most that one broadcast may have, and one of the two staging slots. */
  constructor (groups: WeightGroups, bucketBytes: number) {
    this.#groups = groups
    this.#bucketBytes = bucketBytes
  }

  /**
   * Throws NOT_FOUND, or what the group failed by, where nothing is received. Where the announcement tells how many bytes come, they are received and dropped
   * before it throws what is wrong with it; else the group is aborted, and the message says so.
   */
  async open (request: DistributedRequest): Promise<DistributedSource> {
    const { tensors, sizes, stream, at, isBucket } = this.#announce(request)
    try {
      this.#demandRoom(tensors, sizes, isBucket)
      demandWeights(tensors)
    } catch (error) {
      await stream.close()
      throw withNote(error, stream)
    }
    return {
      kind: 'distributed',
      tensors: tensors.map(({ name, dtype, shape }, index): AnnouncedTensor => ({ name, dtype: torchWeightDType(dtype)!, shape, source: 0, offset: at[index]! })),
      sources: [],
      stream,
      noted: error => withNote(error, stream),
      verify: async () => {},
      close: async () => { await stream.close() }
    }
  }

  /**
   * Of a request that is refused for something else: what it announces is received and dropped where that can be told, else the group is
   * aborted. In a sentence, which became of it; undefined where there is no such group.
   */
  async refuse ({ names, dtypes, shapes, group_name: group, load_format: format }: Readonly<Record<string, unknown>>, groupName: string): Promise<string | undefined> {
    const request = { names, dtypes, shapes, groupName: String(group ?? groupName), loadFormat: format ?? null } as DistributedRequest
    try {
      if (!isListOf(names, isText) || !isListOf(dtypes, isText) || !isListOf(shapes, shape => isListOf(shape, isSize))) return this.#abort(request.groupName, 'the fields of a request were not what they should be')
      const { stream } = this.#announce(request)
      await stream.close()
      return stream.dropped
    } catch (error) {
      return error instanceof RefitError && error.code === 'INVALID_REQUEST' ? error.message : undefined
    }
  }

  #announce ({ names, dtypes, shapes, groupName, loadFormat }: DistributedRequest): Announced {
    const group = this.#groups.get(groupName)
    let tensors: MeasuredTensor[]
    try {
      tensors = measureTensors(names, dtypes, shapes)
    } catch (error) {
      const { code, message, param } = error as RefitError
      throw new RefitError(code, `${message}. ${this.#abort(groupName, message)}`, { cause: error, ...param === undefined ? {} : { param } })
    }
    const isBucket = loadFormat === 'flattened_bucket'
    const sizes = isBucket ? bucketOf(tensors) : tensors.map(({ bytes }) => bytes)
    const { offsets, pieces } = layOutPieces(sizes, Math.min(this.#bucketBytes, group.pieceBytes))
    const stream = group.announce(pieces, ({ first, end }) => isBucket ? `the bucket of ${nameRange(names)}` : nameRange(names.slice(first, end)))
    return { tensors, sizes, stream, isBucket, at: isBucket ? runningSums(tensors) : offsets }
  }

  /** Nobody knows how far the trainer is. */
  #abort (groupName: string, reason: string): string {
    this.#groups.get(groupName).giveUp(reason)
    return `Nobody can tell what the trainer sends, so that process group "${groupName}" was aborted; initialise it again`
  }

  #demandRoom (tensors: readonly MeasuredTensor[], sizes: readonly number[], isBucket: boolean): void {
    const index = sizes.findIndex(size => size > this.#bucketBytes)
    if (index < 0) return
    const what = isBucket ? `the bucket of ${tensors.length} tensors` : `tensor "${tensors[index]!.name}"`
    throw new RefitError('TENSOR_PAYLOAD', `${what} has ${sizes[index]!} bytes, and one broadcast may have ${this.#bucketBytes} (--bucket-bytes)`, { param: isBucket ? 'shapes' : tensors[index]!.name })
  }
}

function withNote (error: unknown, { dropped }: Receipt): unknown {
  if (!(error instanceof RefitError) || dropped === undefined) return error
  return new RefitError(error.code, `${error.message}. ${dropped}`, { cause: error, ...error.param === undefined ? {} : { param: error.param } })
}

function demandWeights (tensors: readonly MeasuredTensor[]): void {
  const unread = tensors.find(({ dtype }) => torchWeightDType(dtype) === undefined)
  if (unread !== undefined) throw new RefitError('TENSOR_PAYLOAD', `tensor "${unread.name}": ${describeUnreadDType(unread.dtype)}`, { param: unread.name })
}

/** None for no tensors: torch's bucket of none does not exist. */
function bucketOf (tensors: readonly MeasuredTensor[]): number[] {
  return tensors.length === 0 ? [] : [tensors.reduce((sum, { bytes }) => sum + bytes, 0)]
}

function runningSums (tensors: readonly MeasuredTensor[]): number[] {
  let sum = 0
  return tensors.map(({ bytes }) => {
    sum += bytes
    return sum - bytes
  })
}

function isListOf (value: unknown, is: (item: unknown) => boolean): boolean { return Array.isArray(value) && value.every(is) }
function isText (value: unknown): boolean { return typeof value === 'string' }
function isSize (value: unknown): boolean { return typeof value === 'number' }
