import { errorMessage, RefitError } from '../errors.ts'
import { DTYPES } from '../native/dtypes.ts'
import type { Access } from '../native/addon.ts'
import type { ElementPatch } from '../native/deltas.ts'
import type { TensorEntry } from '../model/architecture.ts'
import { cutCheckpoint, rowBytes } from '../model/checkpoint-layout.ts'
import type { CheckpointPiece, LaidTensor } from '../model/checkpoint-layout.ts'
import { gatherRows } from './gather.ts'
import type { AnnouncedTensor, PatchSource, StreamedSource } from '../contract/weight-source.ts'
import type { StreamPiece, WeightStream } from '../contract/weight-stream.ts'
import type { WeightStore } from './weight-store.ts'

/** A piece must stay unchanged until the next one is requested, so two buffers are enough. */
const TURNS = 2

interface PatchedTensor extends LaidTensor {
  patches: readonly ElementPatch[]
}

/** A source of whole tensors, and the number of elements that have changed so far. */
export interface PatchedSource {
  source: StreamedSource
  readonly changed: number
}

/**
 * Turns changes of elements into whole tensors. When the update has opened its parameters (`access`), the current
 * values are read from the ranks that hold them, changed, and written back to all of them, piece by piece. Throws
 * CONFLICT for an `unreadable` tensor, and if another update has written since the base of the changes. Called in the
 * update's turn.
 */
export function patchSource (
  store: WeightStore,
  sent: PatchSource,
  access: Access,
  unreadable: ReadonlySet<string>
): PatchedSource {
  const { tensors: patches, baseEpoch = store.epoch } = sent.patch
  if (baseEpoch !== store.epoch) {
    throw new RefitError(
      'CONFLICT',
      'another update has written weights since the weights that these changes are relative to. Nothing has changed'
    )
  }
  const { table, dtype } = store
  const laid: PatchedTensor[] = []
  let end = 0
  const tensors = sent.tensors.map((tensor): AnnouncedTensor => {
    const plan = table.tensors.get(table.canonical(tensor.name))
    const announced = { name: tensor.name, dtype: plan?.dtype ?? dtype, shape: tensor.shape, source: 0, offset: end }
    // Names that the model does not have are refused or ignored later, with those of all announced tensors.
    if (plan === undefined) return announced
    requireWhole(store, plan, unreadable)
    laid.push({ plan, offset: end, patches: patches.get(tensor.name) ?? [] })
    end += plan.rows * rowBytes(plan)
    return announced
  })
  const stream = new PatchStream(store, access, laid, end)
  const source: StreamedSource = {
    kind: 'streamed',
    transport: sent.transport,
    tensors,
    stream,
    verify: async () => {
      await sent.verify()
    },
    close: async () => {
      await sent.close()
    }
  }
  return {
    source,
    get changed () {
      return stream.changed
    }
  }
}

class PatchStream implements WeightStream {
  changed = 0
  readonly #store: WeightStore
  readonly #access: Access
  readonly #tensors: readonly PatchedTensor[]
  readonly #patchesOf: ReadonlyMap<TensorEntry, readonly ElementPatch[]>
  readonly #pieces: Generator<CheckpointPiece>
  readonly #buffers: Uint8Array[] = []
  #turn = 0

  constructor (store: WeightStore, access: Access, tensors: readonly PatchedTensor[], bytes: number) {
    this.#store = store
    this.#access = access
    this.#tensors = tensors
    this.#patchesOf = new Map(tensors.map(({ plan, patches }) => [plan, patches]))
    this.#pieces = cutCheckpoint({ tensors: [...tensors], bytes }, store.patchBytes)
  }

  /** Checks every position before the gate shuts. */
  async ready (): Promise<void> {
    const { addon, core } = this.#store
    for (const { plan, patches } of this.#tensors) {
      try {
        await addon.checkPatches(core, patches, plan.rows * plan.cols, DTYPES[plan.dtype])
      } catch (error) {
        throw new RefitError(
          'TENSOR_PAYLOAD',
          `tensor "${plan.name}": ${errorMessage(error)}. Nothing has changed`,
          { param: plan.name, cause: error }
        )
      }
    }
  }

  async next (): Promise<StreamPiece | undefined> {
    const { value: piece, done } = this.#pieces.next()
    if (done === true) return undefined
    const { addon, core } = this.#store
    const buffer = this.#buffer(piece.length)
    for (const part of piece.parts) {
      const { plan, row, rows, at } = part
      await gatherRows({ addon, core, access: this.#access }, part, buffer)
      const block = buffer.subarray(at, at + rows * rowBytes(plan))
      const dtype = DTYPES[plan.dtype]
      this.changed += await addon.applyPatches(core, this.#patchesOf.get(plan)!, block, row * plan.cols, dtype)
    }
    return { begin: piece.begin, length: piece.length, source: { buffer } }
  }

  #buffer (length: number): Uint8Array {
    const turn = this.#turn++ % TURNS
    let buffer = this.#buffers[turn]
    if (buffer === undefined || buffer.length < length) this.#buffers[turn] = buffer = new Uint8Array(length)
    return buffer.subarray(0, length)
  }
}

function requireWhole ({ ledger, coverage }: WeightStore, plan: TensorEntry, torn: ReadonlySet<string>): void {
  const name = coverage.names(plan).find(name => torn.has(name))
  if (name === undefined) return
  throw new RefitError(
    'CONFLICT',
    `tensor "${name}" is torn, and a delta changes existing values: send it whole first (${
      ledger.tornReason ?? 'torn'
    }). Nothing has changed`,
    { param: name }
  )
}
