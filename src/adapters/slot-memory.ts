import { errorMessage, RefitError } from '../errors.ts'
import type { AdapterModule } from '../model/adapter-modules.ts'
import { slotRank } from '../model/adapter-slots.ts'
import type { ModelTable, Rect } from '../model/architecture.ts'
import type { AnnouncedTensor, StoredSource, WeightSource } from '../contract/weight-source.ts'
import type { GateClosure } from '../contract/gate.ts'
import type { Access, NativeAddon } from '../native/addon.ts'
import { bytesOf } from '../native/dtypes.ts'
import type { WriteJob, WriteOutcome } from '../native/write-job.ts'
import { TENSOR_FIELDS } from '../native/write-layout.ts'
import type { HeldDType } from '../native/dtypes.ts'
import { totalsOf } from '../weights/checksum.ts'
import { layOut } from '../weights/plan.ts'
import { scatterStream } from '../weights/scatter-stream.ts'
import { writeJob } from '../weights/scatter.ts'
import type { ScatterOutcome } from '../weights/scatter.ts'
import type { AdapterPlan, PlannedModule } from './plan-adapter.ts'
import { areWhole, digestOf, isZero, joinJobs, slotJob, SlotLayouts } from './slot-layout.ts'
import type { SlotLayout, WholeJob } from './slot-layout.ts'
import { matched, memorySource } from './slot-source.ts'
import type { Placed } from './slot-source.ts'

/** The content of a slot: for each module the rank and the scale. */
export interface SlotContent {
  modules: readonly Pick<PlannedModule, 'module' | 'rank' | 'scale'>[]
}

/** The bytes of an adapter as each rank holds them, in host memory. */
export interface SlotImage {
  parts: { rank: number, param: number, rows: number, cols: number, bytes: Uint8Array }[]
  bytes: number
}

export interface SlotMemoryOptions {
  addon: NativeAddon
  core: number
  table: ModelTable
  dtype: HeldDType
  /** The set of weights in use: slots are the same in each set, and this one has memory. */
  liveSet: () => number
  /** Runs while steps go on; the weights' memory is not released meanwhile. Throws ENGINE_ASLEEP if it is. */
  besideSteps: <T>(run: () => Promise<T>) => Promise<T>
  /** Runs between two steps, while no weights are written. */
  betweenSteps: <T>(run: () => Promise<T>, deadlineMs: number) => Promise<T>
  /**
   * Broadcasts are received while steps go on, as those of weights are on an engine with two sets (default false:
   * between two steps). The caller keeps the weights' memory from being released meanwhile.
   */
  receivesBeside?: boolean
}

const FLOAT_BYTES = 4

/**
 * Reads and writes slots while steps go on: no step touches a slot that no request uses. Only what a process group
 * receives is written between two steps, unless `receivesBeside`. The caller makes sure that no request uses the slot
 * and that one call at a time works on it.
 */
export class SlotMemory {
  readonly #options: SlotMemoryOptions
  readonly #layouts = new SlotLayouts()
  /** By slot and module: rows of A and columns of B from here on are zero. */
  readonly #filled: Map<string, number>[]
  /** By slot: the layout of what it holds, if all of it was written by one job. */
  readonly #held: (SlotLayout | undefined)[] = []

  constructor (options: SlotMemoryOptions) {
    this.#options = options
    this.#filled = Array.from({ length: options.table.adapters!.slots }, () => new Map<string, number>())
  }

  get #beside (): Access {
    return { set: this.#options.liveSet(), beside: true }
  }

  /**
   * Writes an adapter. Returns the bytes read, and the digest of what the slot holds. Throws the source's error; the
   * slot's content is undefined then.
   */
  async write (
    slot: number,
    source: WeightSource,
    { modules, like }: Pick<AdapterPlan, 'modules' | 'like'>,
    deadlineMs: number
  ): Promise<Written & { digest: string, isZero: boolean }> {
    if (source.kind === 'patch') throw new RefitError('ADAPTER_REFUSED', 'LoRA adapters are sent whole, not as changes')
    if (source.kind === 'placed') throw new RefitError('ADAPTER_REFUSED', 'LoRA adapters are sent whole, not in shards')
    const layout = this.#layouts.of(slot, like)
    const { sums, ...written } = source.kind === 'stored' && areWhole(modules)
      ? await this.#writeWhole(slot, source, modules, layout)
      : { sums: undefined, ...await this.#writeParts(slot, source, modules, deadlineMs) }
    const checksums = totalsOf(layout.sums, sums ?? await this.#checksums(layout))
    return { ...written, digest: digestOf(layout, checksums), isZero: isZero(checksums) }
  }

  /** Ranks, scales, tensors and checksums in one job, because each job waits for all ranks. */
  async #writeWhole (
    slot: number,
    source: StoredSource,
    modules: readonly PlannedModule[],
    layout: SlotLayout
  ): Promise<{ bytes: number, sums?: BigUint64Array }> {
    const known = this.#held[slot] === layout ? layout.last : undefined
    this.#held[slot] = undefined
    const isKnown = known?.modules === modules && known.sources === source.sources.length
    const { whole, settle } = isKnown
      ? { whole: known, settle: () => {} }
      : this.#wholeJob(slot, source, modules, layout)
    const { tensors, rects, own, ownBytes } = whole
    const names = (index: number): string => {
      const { a, b } = modules[index >> 1] ?? {}
      return (index % 2 === 0 ? a : b)?.name ?? 'ranks and scales'
    }
    const job = { sources: [...source.sources, ...own], tensors, rects, sums: layout.sums }
    const { bytes, sums } = await this.#run(source, job, tensors.length / TENSOR_FIELDS, names)
    settle()
    this.#held[slot] = layout
    return { bytes: bytes - ownBytes, ...sums === undefined ? {} : { sums } }
  }

  /** It is kept if it has nothing to clear: the same adapter in the same memory needs no other one. */
  #wholeJob (
    slot: number,
    source: StoredSource,
    modules: readonly PlannedModule[],
    layout: SlotLayout
  ): { whole: WholeJob, settle: () => void } {
    const { entries, source: setting, settle } = this.#setting(slot, { modules })
    const { job, bytes: ownBytes } = layOut(setting, entries.map(matched))
    const { tensors, rects } = joinJobs(slotJob(source, modules, layout), job)
    const whole = { modules, sources: source.sources.length, own: job.sources, ownBytes, tensors, rects }
    if (entries.length === 1) layout.last = whole
    return { whole, settle }
  }

  async #writeParts (
    slot: number,
    source: StoredSource | StreamedSource,
    modules: readonly PlannedModule[],
    deadlineMs: number
  ): Promise<Written> {
    const tensors = modules.flatMap(({ module, rank, a, b }) => [
      { tensor: a, rects: module.a(slot, 0, rank) },
      { tensor: b, rects: module.b(slot, 0, rank) }
    ])
    const { entries, source: own, settle } = this.#setting(slot, { modules })
    await this.#copy(own, entries)
    const written = source.kind === 'stored'
      ? { bytes: await this.#copy(source, tensors) }
      : await this.#receive(source, tensors, deadlineMs)
    settle()
    return written
  }

  /** Copies a slot into host memory. */
  async read (slot: number, { modules }: SlotContent): Promise<SlotImage> {
    const { addon, core, besideSteps } = this.#options
    const parts: SlotImage['parts'] = []
    let bytes = 0
    await besideSteps(async () => {
      for (const { rank, param, dstRow, dstCol, rows, cols } of modules.flatMap(module => imageRects(slot, module))) {
        const part = await addon.read(core, rank, param, dstRow, dstCol, rows, cols, this.#beside)
        parts.push({ rank, param, rows, cols, bytes: part })
        bytes += part.length
      }
    })
    return { parts, bytes }
  }

  /**
   * The bytes of A and B of each module, row-major. An embedding's A is transposed: [vocabulary, r]. The caller holds
   * the slot.
   */
  async *tensors (slot: number, { modules }: SlotContent): AsyncGenerator<Uint8Array, void, undefined> {
    for (const { module, rank } of modules) {
      const cols = module.target === 'embed_tokens' ? rank : module.inSize
      yield await this.#whole(module.a(slot, 0, rank), cols)
      yield await this.#whole(module.b(slot, 0, rank), rank)
    }
  }

  /** Joins the parts of a tensor that the ranks hold. */
  async #whole (rects: readonly Rect[], tensorCols: number): Promise<Uint8Array> {
    const { addon, core, dtype, besideSteps } = this.#options
    const size = bytesOf(dtype)
    return await besideSteps(async () => {
      const parts = new Map<string, { rect: Rect, bytes: Uint8Array }>()
      for (const rect of rects) {
        const region = `${rect.srcRow},${rect.srcCol}`
        // Several ranks may hold the same part.
        if (parts.has(region)) continue
        const { rank, param, dstRow, dstCol, rows, cols } = rect
        const bytes = await addon.read(core, rank, param, dstRow, dstCol, rows, cols, this.#beside)
        parts.set(region, { rect, bytes })
      }
      const [first] = parts.values()
      if (parts.size === 1) return first!.bytes
      const whole = new Uint8Array(
        [...parts.values()].reduce((sum, { bytes }) => sum + bytes.length, 0)
      )
      for (const { rect: { srcRow, srcCol, rows, cols }, bytes } of parts.values()) {
        const length = cols * size
        for (let row = 0; row < rows; row++) {
          whole.set(bytes.subarray(row * length, (row + 1) * length), ((srcRow + row) * tensorCols + srcCol) * size)
        }
      }
      return whole
    })
  }

  /** Writes an image of `read` into any slot. */
  async restore (slot: number, content: SlotContent, image: SlotImage): Promise<void> {
    const { dtype } = this.#options
    const rects = content.modules.flatMap(module => imageRects(slot, module))
    const tensors = rects.map((rect, index) => ({
      tensor: {
        name: `part ${index}`,
        dtype,
        shape: [rect.rows, rect.cols],
        source: index,
        offset: 0
      } satisfies AnnouncedTensor,
      rects: [{ ...rect, srcRow: 0, srcCol: 0 }]
    }))
    const source = memorySource(
      image.parts.map(({ bytes }) => ({ buffer: bytes })),
      tensors.map(({ tensor }) => tensor)
    )
    const { entries, source: own, settle } = this.#setting(slot, content)
    await this.#copy(own, entries)
    await this.#copy(source, tensors)
    settle()
  }

  /** The memory of all slots was released and has come back with any content. */
  forget (): void {
    const { modules, rank } = this.#options.table.adapters!
    this.#held.length = 0
    for (const filled of this.#filled) for (const name of modules.keys()) filled.set(name, rank)
  }

  /**
   * The part of a write that its source does not have: ranks and scales, and zeros where an adapter before had larger
   * ranks. `settle` is called when all of the write has succeeded.
   */
  #setting (slot: number, content: SlotContent): Setting {
    const { table, dtype } = this.#options
    this.#held[slot] = undefined
    const modules = [...table.adapters!.modules.values()]
    const entries: Placed[] = [this.#tableEntry(slot)]
    const filled = this.#filled[slot]!
    const shared = new Map(content.modules.map(({ module: { row }, rank }) => [row, rank]))
    const own = new Set(content.modules.map(({ module }) => module.name))
    let most = 0
    const zero = (rects: Rect[], rows: number, cols: number): void => {
      most = Math.max(most, rows * cols)
      entries.push({ tensor: { name: 'zeros', dtype, shape: [rows, cols], source: 1, offset: 0 }, rects })
    }
    for (const module of modules) {
      const rank = shared.get(module.row)
      // Kernels skip modules of rank 0, whatever their memory holds.
      if (rank === undefined) continue
      // The other experts of a layer may have adapters where this one has none.
      const from = own.has(module.name) ? rank : 0
      const to = filled.get(module.name) ?? 0
      // Until all of it has been written, either the old or the new ranks may hold values.
      filled.set(module.name, Math.max(to, from))
      if (to <= from) continue
      const [aRows, aCols] = module.target === 'embed_tokens' ? [module.inSize, to - from] : [to - from, module.inSize]
      zero(module.a(slot, from, to), aRows, aCols)
      zero(module.b(slot, from, to), module.outSize, to - from)
    }
    const buffers = [{ buffer: this.#scales(content) }, { buffer: new Uint8Array(most * bytesOf(dtype)) }]
    const settle = (): void => {
      for (const { name, row } of modules) {
        const rank = shared.get(row)
        if (rank !== undefined) filled.set(name, own.has(name) ? rank : 0)
      }
    }
    return { entries, source: memorySource(buffers, entries.map(({ tensor }) => tensor)), settle }
  }

  #tableEntry (slot: number): Placed {
    const { table } = this.#options
    const param = table.params.findIndex(({ name }) => name === 'adapters.table')
    const rows = table.params[param]!.rows / table.adapters!.slots
    const rects = Array.from({ length: table.ranks }, (_, rank) => ({
      rank,
      param,
      srcRow: 0,
      srcCol: 0,
      rows,
      cols: 2,
      dstRow: slot * rows,
      dstCol: 0
    }))
    return { tensor: { name: 'table', dtype: 'float32', shape: [rows, 2], source: 0, offset: 0 }, rects }
  }

  #scales ({ modules }: SlotContent): Uint8Array {
    const { params, adapters } = this.#options.table
    const rows = params.find(({ name }) => name === 'adapters.table')!.rows / adapters!.slots
    const values = new DataView(new ArrayBuffer(rows * 2 * FLOAT_BYTES))
    for (const { module: { row }, rank, scale } of modules) {
      values.setFloat32(row * 2 * FLOAT_BYTES, scale, true)
      values.setFloat32((row * 2 + 1) * FLOAT_BYTES, rank, true)
    }
    return new Uint8Array(values.buffer)
  }

  async #checksums ({ sums: { rects, cols } }: SlotLayout): Promise<BigUint64Array> {
    const { addon, core, besideSteps } = this.#options
    return await besideSteps(async () => await addon.checksum(core, rects, cols, this.#beside))
  }

  /** Returns the bytes read. */
  async #copy (source: StoredSource, tensors: readonly Placed[]): Promise<number> {
    const plan = layOut({ ...source, tensors: tensors.map(({ tensor }) => tensor) }, tensors.map(matched))
    const { bytes } = await this.#run(source, plan.job, plan.tensors.length, index => plan.tensors[index]?.name ?? '?')
    return bytes
  }

  /** `names`: of the job's tensors. */
  async #run (
    source: StoredSource,
    job: WriteJob,
    count: number,
    names: (index: number) => string
  ): Promise<WriteOutcome> {
    const { addon, core, besideSteps } = this.#options
    const outcome = await besideSteps(
      async () => await writeJob({ addon, core, access: this.#beside }, job, count)
    )
    const { error } = outcome
    if (error !== undefined) throw readError(source, names(error.tensor), error.message)
    return outcome
  }

  async #receive (
    source: StreamedSource,
    tensors: readonly Placed[],
    deadlineMs: number
  ): Promise<Written> {
    const { addon, core, liveSet, betweenSteps, receivesBeside = false } = this.#options
    const plan = { ...layOut(source, tensors.map(matched)), count: 0, names: new Set<string>(), ignored: [] }
    await source.stream.ready()
    const receive = async (access: Access): Promise<ScatterOutcome> =>
      await scatterStream({ addon, core, access }, plan, source.stream)
    const between = async (): Promise<ScatterOutcome & { closure: GateClosure }> =>
      await betweenSteps(async () => {
        const shutAt = performance.now()
        const outcome = await receive({ set: liveSet() })
        return { ...outcome, closure: { shutAt, openedAt: performance.now() } }
      }, deadlineMs)
    const { bytes, error, closure }: ScatterOutcome & { closure?: GateClosure } = receivesBeside
      ? await receive(this.#beside)
      : await between()
    if (error === undefined) return { bytes, ...closure === undefined ? {} : { closure } }
    if (error.cause instanceof RefitError) throw error.cause
    throw readError(source, plan.tensors[error.tensor]?.name ?? '?', error.message)
  }
}

interface Written {
  /** Bytes that were read or received. */
  bytes: number
  /** When no step ran, if it was written between two steps. */
  closure?: GateClosure
}

interface Setting {
  entries: Placed[]
  source: StoredSource
  settle: () => void
}

type StreamedSource = Extract<WeightSource, { kind: 'streamed' }>

/** The rectangles that an adapter takes in a slot, with its padding to whole tiles. */
function imageRects (slot: number, { module, rank }: { module: AdapterModule, rank: number }): Rect[] {
  return [...module.a(slot, 0, slotRank(rank)), ...module.b(slot, 0, slotRank(rank))]
}

function readError ({ transport }: WeightSource, tensor: string, message: unknown): RefitError {
  return new RefitError(transport.readError, `reading failed at tensor "${tensor}": ${errorMessage(message)}`, {
    param: tensor
  })
}
