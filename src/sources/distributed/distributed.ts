import { RefitError } from '../../errors.ts'
import { layOutPieces } from '../../process-groups/pieces.ts'
import { nameRange } from '../../process-groups/group-messages.ts'
import { receiveStream } from '../../process-groups/receive-bytes.ts'
import type { BroadcastStream } from '../../process-groups/broadcast-stream.ts'
import { DISTRIBUTED } from '../../process-groups/transport.ts'
import type { WeightGroup } from '../../process-groups/weight-group.ts'
import type { WeightGroups } from '../../process-groups/weight-groups.ts'
import type { StoredSource, StreamedSource } from '../../contract/weight-source.ts'
import { announcedTensors, requireWeights } from './announced.ts'
import { cutBroadcasts, placeTensors } from './broadcasts.ts'
import type { Broadcasts, Packing } from './broadcasts.ts'
import { measureTensors } from '../measure-tensors.ts'
import type { MeasuredTensor } from '../measure-tensors.ts'

export interface DistributedRequest {
  names: readonly string[]
  dtypes: readonly string[]
  shapes: readonly (readonly number[])[]
  groupName: string
  /**
   * "flattened_bucket": one broadcast of the tensors' bytes, one after another. Else one broadcast for each tensor, in
   * order.
   */
  loadFormat: string | null
  /** Replaces `loadFormat`, for trainers that announce how they pack tensors. */
  packing?: Packing
  /**
   * The trainer sends only after a reply that permits it, so a request that is refused before `stream.ready` is not
   * sent (default false).
   */
  waitsForReply?: boolean
}

/**
 * Tensors that rank 0 of a process group broadcasts. Always close it: tensors that were not read are then received and
 * dropped.
 */
export interface DistributedSource extends StreamedSource {
  explain: (error: unknown) => unknown
  /** Replaces `close` after a refusal, for a trainer that waits for permission. */
  withdraw: () => void
}

/** Tensors in host memory. */
export interface ReceivedTensors {
  source: StoredSource
  /** The group that sent them is still the one of its name, and has not failed. */
  isCurrent: () => boolean
}

interface Announced {
  group: WeightGroup
  tensors: MeasuredTensor[]
  broadcasts: Broadcasts
  stream: BroadcastStream
  at: number[]
}

/** Makes sources of the tensors that trainers announce to send through groups. */
export class DistributedReceiver {
  readonly #groups: WeightGroups
  readonly #bucketBytes: number
  readonly #isBeside: boolean

  /**
   * `bucketBytes`: the most bytes of one broadcast, and of one of the two staging slots. `isBeside`: bytes for host
   * memory come while steps go on (an engine with two sets of weights).
   */
  constructor (groups: WeightGroups, bucketBytes: number, isBeside = false) {
    this.#groups = groups
    this.#bucketBytes = bucketBytes
    this.#isBeside = isBeside
  }

  /**
   * Throws NOT_FOUND or the group's own failure, and receives nothing then. If the announcement is wrong and its size
   * is known, the bytes are received and dropped before the error is thrown; else the group is aborted, and the message
   * reports it.
   */
  async open (request: DistributedRequest): Promise<DistributedSource> {
    const { tensors, stream, at } = await this.#open(request)
    return {
      kind: 'streamed',
      transport: DISTRIBUTED,
      tensors: announcedTensors(tensors, at),
      stream,
      explain: error => withNote(error, stream),
      verify: async () => {},
      withdraw: () => {
        stream.withdraw()
      },
      close: async () => {
        await stream.close()
      }
    }
  }

  /** Receives the tensors of a request into host memory. Throws as `open`, NO_MEMORY, or the group's failure. */
  async receive (request: DistributedRequest): Promise<ReceivedTensors> {
    const { group, tensors, stream, at } = await this.#open(request)
    const length = Math.max(0, ...tensors.map(({ bytes }, index) => at[index]! + bytes))
    let buffer: Uint8Array
    try {
      buffer = new Uint8Array(length)
    } catch {
      await stream.close()
      throw new RefitError('NO_MEMORY', `no host memory for ${length} bytes of tensors that wait for others`)
    }
    await receiveStream(group, stream, (bytes, begin) => {
      // A piece ends with a gap.
      buffer.set(bytes.subarray(0, buffer.length - begin), begin)
    }, this.#isBeside)
    return {
      isCurrent: () => this.#groups.has(group),
      source: {
        kind: 'stored',
        transport: DISTRIBUTED,
        tensors: announcedTensors(tensors, at),
        sources: [{ buffer }],
        verify: async () => {},
        close: async () => {}
      }
    }
  }

  async #open (request: DistributedRequest): Promise<Announced> {
    const announced = this.#announce(request)
    const { tensors, broadcasts, stream } = announced
    try {
      this.#requireRoom(tensors, broadcasts, request.packing)
      requireWeights(tensors)
    } catch (error) {
      if (request.waitsForReply === true) {
        stream.withdraw()
        throw error
      }
      await stream.close()
      throw withNote(error, stream)
    }
    return announced
  }

  /**
   * For a request that is refused for another reason: receives and drops the announced bytes if their size is known,
   * else aborts the group. Returns a sentence that names the outcome; undefined if there is no such group.
   */
  async refuse (
    { names, dtypes, shapes, group_name: group, load_format: format }: Readonly<Record<string, unknown>>,
    groupName: string,
    packing?: Packing
  ): Promise<string | undefined> {
    const request = {
      names,
      dtypes,
      shapes,
      groupName: String(group ?? groupName),
      loadFormat: format ?? null,
      ...packing === undefined ? {} : { packing }
    } as DistributedRequest
    try {
      if (
        !isListOf(names, isText) || !isListOf(dtypes, isText) || !isListOf(shapes, shape => isListOf(shape, isSize))
      ) return this.#abort(request.groupName, 'the fields of a request were not what they should be')
      const { stream } = this.#announce(request)
      await stream.close()
      return stream.dropped
    } catch (error) {
      return error instanceof RefitError && (error.code === 'INVALID_REQUEST' || error.code === 'TENSOR_PAYLOAD')
        ? error.message
        : undefined
    }
  }

  #announce (
    {
      names,
      dtypes,
      shapes,
      groupName,
      loadFormat,
      packing = loadFormat === 'flattened_bucket' ? 'whole' : 'each',
      waitsForReply
    }: DistributedRequest
  ): Announced {
    const group = this.#groups.get(groupName)
    let tensors: MeasuredTensor[]
    try {
      tensors = measureTensors(names, dtypes, shapes)
    } catch (error) {
      if (waitsForReply === true) throw error
      const { code, message, param } = error as RefitError
      throw new RefitError(code, `${message}. ${this.#abort(groupName, message)}`, {
        cause: error,
        ...param === undefined ? {} : { param }
      })
    }
    const broadcasts = cutBroadcasts(tensors, packing)
    // Dropped bytes lie in a slot too, so an announcement makes the server allocate no memory.
    if (waitsForReply !== true && broadcasts.sizes.some(size => size > 2 * this.#bucketBytes)) {
      this.#refuseLarge(groupName, tensors, broadcasts, packing)
    }
    const { offsets, pieces } = layOutPieces(broadcasts.sizes, Math.min(this.#bucketBytes, group.pieceBytes))
    const stream = group.announce(pieces, ({ first, end }) => {
      const of = nameRange(names.slice(broadcasts.spans[first]![0], broadcasts.spans[end - 1]![1]))
      return packing === 'whole' ? `the bucket of ${of}` : of
    }, this.#bucketBytes)
    return { group, tensors, broadcasts, stream, at: placeTensors(tensors, broadcasts, offsets) }
  }

  /** The trainer's progress is unknown, so the group cannot be used any more. */
  #abort (groupName: string, reason: string): string {
    this.#groups.get(groupName).abandon(reason)
    return `The size of the trainer's broadcast is unknown, so process group "${groupName}" was aborted; ` +
      'initialise it again'
  }

  #refuseLarge (groupName: string, tensors: readonly MeasuredTensor[], broadcasts: Broadcasts, packing: Packing): void {
    try {
      this.#requireRoom(tensors, broadcasts, packing)
    } catch (error) {
      const { code, message, param } = error as RefitError
      this.#groups.get(groupName).abandon(message)
      throw new RefitError(
        code,
        `${message}. There is no room to receive and drop it, so that process group "${groupName}" was aborted; ` +
          'initialise it again',
        { cause: error, ...param === undefined ? {} : { param } }
      )
    }
  }

  #requireRoom (tensors: readonly MeasuredTensor[], { sizes, spans }: Broadcasts, packing?: Packing): void {
    const index = sizes.findIndex(size => size > this.#bucketBytes)
    if (index < 0) return
    const [first, end] = spans[index]!
    const isOne = end === first + 1
    const what = isOne
      ? `tensor "${tensors[first]!.name}"`
      : `the ${typeof packing === 'object' ? 'chunk' : 'bucket'} of ${end - first} tensors`
    const why = typeof packing === 'object' && !isOne
      ? `; a chunk ends after the tensor with which it exceeds the buffer of ${packing.bufferBytes} bytes`
      : ''
    throw new RefitError(
      'TENSOR_PAYLOAD',
      `${what} has ${sizes[index]!} bytes, and one broadcast may have ${this.#bucketBytes} (--bucket-bytes)${why}`,
      { param: isOne ? tensors[first]!.name : 'shapes' }
    )
  }
}

function withNote (error: unknown, { dropped }: BroadcastStream): unknown {
  if (!(error instanceof RefitError) || dropped === undefined) return error
  return new RefitError(error.code, `${error.message}. ${dropped}`, {
    cause: error,
    ...error.param === undefined ? {} : { param: error.param }
  })
}

function isListOf (value: unknown, is: (item: unknown) => boolean): boolean {
  return Array.isArray(value) && value.every(is)
}
function isText (value: unknown): boolean {
  return typeof value === 'string'
}
function isSize (value: unknown): boolean {
  return typeof value === 'number'
}
