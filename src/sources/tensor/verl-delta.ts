import type { DeltaHost } from '../../contract/delta-host.ts'
import { RefitError } from '../../errors.ts'
import { POSITIONS } from '../../native/deltas.ts'
import { DTYPES } from '../../native/dtypes.ts'
import type { ElementPatch } from '../../native/deltas.ts'
import type { DType } from '../../native/dtypes.ts'
import type { AnnouncedTensor, WeightPatch, WriteReport } from '../../contract/weight-source.ts'
import { contiguous } from '../../wire/torch/bucket.ts'
import { describeUnreadDType, torchWeightDType } from '../../wire/torch/dtypes.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import type { TensorDescriptor } from '../../wire/torch/tensor.ts'
import {
  DELTA_POSITIONS,
  DELTA_SPEC,
  DELTA_VALUES,
  deltaChecksum,
  readDeltaSpec,
  valueBytes
} from '../../wire/trainers/verl-delta.ts'
import type { DeltaParam, DeltaSpec } from '../../wire/trainers/verl-delta.ts'
import { announceTensors } from '../announce-tensors.ts'
import type { OpenTensors } from '../disk/run-loader.ts'
import { DeltaBases } from './delta-bases.ts'
import type { DeltaHooks } from './delta-bases.ts'
import { TensorBytes } from './tensor-bytes.ts'

/** The contents of a flush, for a source. */
export interface DeltaParts {
  tensors: AnnouncedTensor[]
  /** Absent for whole tensors. */
  patch?: WeightPatch
  hooks: DeltaHooks
}

/** The load_format of verl's delta_sharded: the path of a function in verl that SGLang's workers would import. */
export const VERL_DELTA = 'verl.workers.rollout.sglang_rollout.delta_loader.apply_delta'

const MAX_SPEC_BYTES = 64 << 20

interface Flush {
  spec: TensorDescriptor
  positions: TensorDescriptor | undefined
  values: TensorDescriptor
}

/**
 * verl's flushes. `indices` is a change of elements, `dense` whole tensors. Every rank gets a copy of the same flush.
 * Changes are read from the first rank's copy, whole tensors from each rank's own.
 */
export class VerlDelta {
  readonly #host: DeltaHost
  /** For the running verification: elements that were not equal, by tensor. */
  readonly #unequal = new Map<string, number>()
  readonly #bases: DeltaBases

  constructor (host: DeltaHost) {
    this.#host = host
    this.#bases = new DeltaBases(host.base)
  }

  /**
   * Throws TENSOR_PAYLOAD, and CONFLICT if an earlier delta was lost. The sender's memory must stay until the result
   * has been written.
   */
  async open ({ ranks, sources, sourceOf }: OpenTensors): Promise<DeltaParts> {
    const bytes = new TensorBytes(storage => sources[sourceOf.get(storage) ?? -1], this.#host)
    const lists = [...new Set(ranks)].map(findFlush)
    const first = lists[0]!
    const spec = await this.#readSpec(lists, bytes)
    if (!spec.verify) this.#unequal.clear()
    if (spec.encoding === 'dense' && !spec.verify) {
      for (const flush of lists) await this.#requireChecksum(spec, null, flush, bytes)
      const flushOf = new Map(ranks.map(rank => [rank, flushOfRank(rank, spec)]))
      const tensors = announceTensors(ranks.map(rank => flushOf.get(rank)!), sourceOf)
      return { tensors, hooks: this.#begin(spec, tensors) }
    }
    const positions = first.positions === undefined ? new Uint8Array(0) : await bytes.read(first.positions)
    const values = await bytes.read(first.values)
    await this.#requireSum(spec, positions, await this.#host.hash(values, torchWeightDType(first.values.dtype)!))
    const patch = patchOf(spec, positions, values, first.values.dtype)
    const tensors = announced(spec, patch)
    return { tensors, patch, hooks: this.#begin(spec, tensors) }
  }

  #begin (spec: DeltaSpec, tensors: readonly AnnouncedTensor[]): DeltaHooks {
    const names = [...new Set(tensors.map(({ name }) => name))]
    const hooks = this.#bases.begin(names, String(spec.checksum), spec.encoding === 'dense')
    return {
      ...hooks,
      accept: report => {
        hooks.accept(report)
        if (spec.verify) this.#compared(spec, report)
      }
    }
  }

  /** All ranks must have the same flush, because only the first rank's changes are read. */
  async #readSpec (lists: readonly Flush[], bytes: TensorBytes): Promise<DeltaSpec> {
    let text: Buffer | undefined
    for (const { spec, positions, values } of lists) {
      if (spec.dtype !== 'uint8') throw payloadError(`it is of ${spec.dtype}, expected uint8`, DELTA_SPEC)
      if (TensorBytes.size(spec) > MAX_SPEC_BYTES) {
        throw payloadError(`it has ${TensorBytes.size(spec)} bytes, and ${MAX_SPEC_BYTES} are the most`, DELTA_SPEC)
      }
      const own = Buffer.from(await bytes.read(spec))
      if (text !== undefined && !text.equals(own)) throw payloadError('ranks are sent different deltas', DELTA_SPEC)
      if (positions !== undefined && positions.dtype !== 'uint8') {
        throw payloadError(`it is of ${positions.dtype}, expected uint8`, DELTA_POSITIONS)
      }
      const size = valueBytes(values.dtype)
      if (size === undefined) {
        throw payloadError(describeUnreadDType(values.dtype), DELTA_VALUES)
      }
      text = own
    }
    const { positions, values } = lists[0]!
    return readDeltaSpec(
      text!,
      positions === undefined ? 0 : TensorBytes.size(positions),
      TensorBytes.size(values) / valueBytes(values.dtype)!
    )
  }

  async #requireChecksum (
    spec: DeltaSpec,
    positions: Uint8Array | null,
    { values }: Flush,
    bytes: TensorBytes
  ): Promise<void> {
    let sum = 0n
    for await (const chunk of bytes.chunks(values)) sum ^= await this.#host.hash(chunk, torchWeightDType(values.dtype)!)
    await this.#requireSum(spec, positions ?? new Uint8Array(0), sum)
  }

  async #requireSum ({ checksum }: DeltaSpec, positions: Uint8Array, values: bigint): Promise<void> {
    const got = deltaChecksum(await this.#host.hash(positions, null), values)
    if (got !== checksum) {
      throw payloadError(
        `the checksum of positions and values is ${got}, and the sender's was ${checksum}: ` +
          'they were changed on the way. Nothing has changed here',
        DELTA_SPEC
      )
    }
  }

  /**
   * A verification compares whole weights with those that deltas have made; nothing should differ. Differences are
   * reported with the last flush, as in verl's own loader.
   */
  #compared ({ params, isLast }: DeltaSpec, { changed = 0 }: WriteReport): void {
    if (changed > 0) {
      this.#unequal.set(
        params.map(({ name }) => name).slice(0, 3).join(', ') + (params.length > 3 ? ', ...' : ''),
        changed
      )
    }
    if (!isLast) return
    const unequal = [...this.#unequal]
    this.#unequal.clear()
    if (unequal.length === 0) return
    const total = unequal.reduce((sum, [, count]) => sum + count, 0)
    throw new RefitError(
      'WEIGHTS_MISMATCH',
      `verification failed: ${total} elements differed from the trainer's, among ${
        unequal.slice(0, 10).map(([names, count]) => `${names} (${count})`).join('; ')
      }. They are the trainer's now`
    )
  }
}

function findFlush (tensors: readonly TensorDescriptor[]): Flush {
  const find = (name: string): TensorDescriptor | undefined => tensors.find(tensor => tensor.name === name)
  const spec = find(DELTA_SPEC)
  const values = find(DELTA_VALUES)
  const positions = find(DELTA_POSITIONS)
  if (spec === undefined || values === undefined || tensors.length !== (positions === undefined ? 2 : 3)) {
    throw payloadError(
      `a delta is ${DELTA_SPEC}, ${DELTA_POSITIONS} (unless it is dense) and ${DELTA_VALUES}, got ${
        tensors
          .map(({ name }) => name)
          .slice(0, 5)
          .join(', ') || 'nothing'
      }`
    )
  }
  return { spec, positions, values }
}

/** Whole tensors as views of a rank's own values. */
function flushOfRank (tensors: readonly TensorDescriptor[], { params }: DeltaSpec): TensorDescriptor[] {
  const { values } = findFlush(tensors)
  const size = valueBytes(values.dtype)!
  return params.map(({ name, shape, values: [start] }) => ({
    ...values,
    name,
    shape,
    stride: contiguous(shape),
    offset: values.offset + start * size
  }))
}

function patchOf (
  { encoding, params }: DeltaSpec,
  positions: Uint8Array,
  values: Uint8Array,
  dtype: string
): WeightPatch {
  const size = valueBytes(dtype)!
  const tensors = new Map<string, ElementPatch[]>()
  for (const { name, positions: [from, to], values: [start, end] } of params) {
    const patch: ElementPatch = {
      encoding: encoding === 'dense' ? POSITIONS.range : POSITIONS.int32,
      positions: positions.subarray(from, to),
      first: 0,
      values: values.subarray(start * size, end * size),
      dtype: DTYPES[torchWeightDType(dtype) as DType],
      xor: false
    }
    const known = tensors.get(name)
    if (known === undefined) tensors.set(name, [patch])
    else known.push(patch)
  }
  return { tensors, bytes: positions.length + values.length }
}

/** Each tensor once, even if its changes have several parts. */
function announced ({ params }: DeltaSpec, { tensors }: WeightPatch): AnnouncedTensor[] {
  const shapes = new Map<string, DeltaParam>()
  for (const param of params) {
    const known = shapes.get(param.name)
    if (known !== undefined && known.shape.join() !== param.shape.join()) {
      throw payloadError(
        `it has the shapes [${known.shape.join(', ')}] and [${param.shape.join(', ')}]`,
        param.name
      )
    }
    shapes.set(param.name, param)
  }
  return [...tensors.keys()].map(name => {
    const { dtype, shape } = shapes.get(name)!
    return { name, dtype: torchWeightDType(dtype)!, shape: [...shape], source: 0, offset: 0 }
  })
}
