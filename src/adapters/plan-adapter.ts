import { RefitError } from '../errors.ts'
import type { AdapterModule } from '../model/adapter-modules.ts'
import type { ModelTable } from '../model/architecture.ts'
import type { AnnouncedTensor } from '../contract/weight-source.ts'
import type { AdapterConfig } from './adapter-config.ts'
import { adapterHalf, embeddingCopy, subTensor, viewOf } from './adapter-tensor.ts'
import type { AdapterHalf, TensorView } from './adapter-tensor.ts'

/** One module of an adapter that fits the model. */
export interface PlannedModule {
  module: AdapterModule
  rank: number
  scale: number
  /** [r, in] and [out, r]; an embedding's A is [vocabulary, r], a transposed view. */
  a: AnnouncedTensor
  b: AnnouncedTensor
  /** The places of A's and B's tensors in the list of tensors. */
  indices: readonly [number, number]
}

export interface AdapterPlan {
  modules: PlannedModule[]
  /** The modules of a plan before, which differ in the places of their tensors only; or the same. */
  like: readonly PlannedModule[]
  rank: number
  /** Names of modules that the configuration targets and the tensors lack. */
  missing: string[]
}

const SHOWN = 5

/**
 * Matches an adapter's tensors with the model's modules. Throws ADAPTER_REFUSED, and nothing has been read then: for
 * names that are no halves of an adapter of this model, modules without room (`--lora-target-modules`), missing
 * halves, ranks beyond the limit or other than the configuration says, shapes of another model, and tensors that are
 * sent twice.
 */
export function planAdapter (
  table: ModelTable,
  config: AdapterConfig,
  tensors: readonly AnnouncedTensor[],
  maxRank: number
): AdapterPlan {
  const { modules: known } = table.adapters!
  const { halves, copies } = readHalves(tensors, table)
  for (const [name, tensor] of copies) checkCopy(name, tensor, halves, table)
  const modules: PlannedModule[] = []
  for (const [name, { a, b }] of halves) {
    if (a === undefined || b === undefined) {
      const [has, lacks] = a === undefined ? ['B', 'A'] : ['A', 'B']
      throw refused(`"${(a ?? b)!.tensor.name}" is ${has} of ${name}, and ${lacks} is missing`, (a ?? b)!.tensor.name)
    }
    if (a.kind === 'experts') modules.push(...splitExperts(name, a, b, { table, config, maxRank }))
    else {
      const module = known.get(name)
      if (module === undefined) throw noRoom(name, a.tensor.name)
      modules.push(planModule(module, a, b, config, maxRank))
    }
  }
  if (modules.length === 0) throw refused('the adapter has no tensors')
  checkShared(modules)
  const planned = new Set<string>()
  for (const { module: { name }, a } of modules) {
    if (planned.has(name)) throw refused(`${name} comes both alone and with all experts`, a.name)
    planned.add(name)
  }
  const { targets } = config
  const missing = targets === null
    ? []
    : [...known.keys()].filter(name => !planned.has(name) && targets(name))
  return { modules, like: modules, rank: modules.reduce((most, { rank }) => Math.max(most, rank), 0), missing }
}

/**
 * Names of modules that the configuration targets and the tensors lack, in whole or in half: tensors of an adapter that
 * comes in parts. Throws as planAdapter for tensors that fit no adapter of this model, whatever follows.
 */
export function missingModules (
  table: ModelTable,
  config: AdapterConfig,
  tensors: readonly AnnouncedTensor[],
  maxRank: number
): string[] {
  if (tensors.length === 0) throw refused('the adapter has no tensors')
  const { halves: read, copies } = readHalves(tensors, table)
  const halves = [...read.values()]
  // The halves of an embedding may come after the copy of its weight.
  const copied = copies.map(([name]) => name).filter(name => !read.has(name))
  const whole = halves.filter(({ a, b }) => a !== undefined && b !== undefined)
  if (whole.length === halves.length && copied.length === 0) return planAdapter(table, config, tensors, maxRank).missing
  const pairs = whole.flatMap(({ a, b }) => [a!.tensor, b!.tensor])
  const alone = halves.filter(pair => !whole.includes(pair)).map(({ a, b }) => (a ?? b)!)
  for (const half of alone) checkHalf(half, { table, config, maxRank })
  const single = [...alone.map(({ module }) => module), ...copied]
  const missing = pairs.length > 0
    ? planAdapter(table, config, pairs, maxRank).missing
    : [...table.adapters!.modules.keys()].filter(name => config.targets?.(name) ?? false)
  return [...new Set([...single, ...missing])]
}

type Halves = { a?: AdapterHalf, b?: AdapterHalf }

/** The halves by module, in the tensors' order. Fused experts have an entry for each of their two tensors. */
function readHalves (
  tensors: readonly AnnouncedTensor[],
  table: ModelTable
): { halves: Map<string, Halves>, copies: ReadonlyArray<readonly [module: string, tensor: AnnouncedTensor]> } {
  const found = new Map<string, Halves>()
  const unknown: string[] = []
  const copies: Array<[module: string, tensor: AnnouncedTensor]> = []
  for (const [index, tensor] of tensors.entries()) {
    const half = adapterHalf(tensor, index, table)
    if (half === null) {
      const copied = embeddingCopy(tensor, table)
      if (copied === null) unknown.push(tensor.name)
      else if (copies.some(([name]) => name === copied)) throw refused(`"${tensor.name}" comes twice`, tensor.name)
      else copies.push([copied, tensor])
      continue
    }
    const key = half.kind === 'experts' && half.isInner ? `${half.module}.base_layer` : half.module
    const own = found.get(key) ?? {}
    const twin = own[half.half]
    if (twin !== undefined) {
      throw refused(`"${twin.tensor.name}" and "${tensor.name}" are the same half of ${half.module}`, tensor.name)
    }
    own[half.half] = half
    found.set(key, own)
  }
  if (unknown.length > 0) {
    const more = unknown.length > SHOWN ? ` and ${unknown.length - SHOWN} more` : ''
    throw refused(
      `${unknown.slice(0, SHOWN).map(name => `"${name.slice(0, 200)}"`).join(', ')}${more}: no half of an adapter of ` +
        'this model; names look like "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"',
      unknown[0]
    )
  }
  return { halves: found, copies }
}

/** Checks a half whose twin has not come, as planModule would. Experts are checked as a whole. */
function checkHalf (
  { kind, half, module: name, tensor }: AdapterHalf,
  { table, config, maxRank }: { table: ModelTable, config: AdapterConfig, maxRank: number }
): void {
  if (kind === 'experts') return
  const module = table.adapters!.modules.get(name)
  if (module === undefined) throw noRoom(name, tensor.name)
  const { rank } = config.shapeOf(name)
  checkRank(name, rank, maxRank)
  if (half === 'a') expectShape(tensor, rank, module.inSize, name)
  else expectShape(tensor, module.outSize, rank, name)
}

/** The copy is not read, so it has to be of a weight that an adapter leaves as it is. */
function checkCopy (
  name: string,
  tensor: AnnouncedTensor,
  halves: ReadonlyMap<string, Halves>,
  { adapters }: ModelTable
): void {
  const module = adapters!.modules.get(name)
  if (module === undefined) throw noRoom(name, tensor.name)
  if (!halves.has(name)) {
    throw refused(`"${tensor.name}" is a base weight, and ${name} has no adapter; send it as a weight`, tensor.name)
  }
  const [rows, cols] = module.target === 'embed_tokens'
    ? [module.inSize, module.outSize]
    : [module.outSize, module.inSize]
  if (tensor.shape.length === 2 && tensor.shape[0] === rows && tensor.shape[1] === cols) return
  throw refused(
    `"${tensor.name}" has shape [${tensor.shape.join(', ')}], and the base model's is [${rows}, ${cols}]: adapters ` +
      'cannot resize the vocabulary',
    tensor.name
  )
}

function planModule (
  module: AdapterModule,
  a: AdapterHalf,
  b: AdapterHalf,
  config: AdapterConfig,
  maxRank: number
): PlannedModule {
  const { rank, scale } = config.shapeOf(module.name)
  checkRank(module.name, rank, maxRank)
  const viewA = expectShape(a.tensor, rank, module.inSize, module.name)
  const viewB = expectShape(b.tensor, module.outSize, rank, module.name)
  return {
    module,
    rank,
    scale,
    a: subTensor(a.tensor, a.kind === 'embedding' ? transposed(viewA) : viewA),
    b: subTensor(b.tensor, viewB),
    indices: [a.index, b.index]
  }
}

interface Limits {
  table: ModelTable
  config: AdapterConfig
  maxRank: number
}

/** Fused experts as the modules of single experts. Gate and up share A. */
function splitExperts (
  key: string,
  a: AdapterHalf,
  b: AdapterHalf,
  { table, config, maxRank }: Limits
): PlannedModule[] {
  const { modules: known } = table.adapters!
  const experts = table.tensors.get(`${a.module}.gate_up_proj`)!.shape[0]!
  const [gate, up, down] = (['gate_proj', 'up_proj', 'down_proj'] as const).map(part =>
    Array.from({ length: experts }, (_, e) => known.get(`${a.module}.${e}.${part}`))
  ) as [AdapterModule[], AdapterModule[], AdapterModule[]]
  const [wholeA, wholeB] = [viewOf(a.tensor), viewOf(b.tensor)]
  const fits = (part: (AdapterModule | undefined)[], copies: number): boolean =>
    part[0] !== undefined && wholeA.cols === part[0].inSize && wholeB.rows === copies * part[0].outSize
  const isGateUp = fits(gate, 2) && fits(up, 2)
  if (!isGateUp && !fits(down, 1)) {
    if ([gate, up, down].every(part => part[0] === undefined)) throw noRoom(key, a.tensor.name)
    throw refused(
      `"${a.tensor.name}" [${a.tensor.shape.join(', ')}] and "${b.tensor.name}" [${b.tensor.shape.join(', ')}] fit ` +
        'neither gate_up_proj nor down_proj of the experts',
      a.tensor.name
    )
  }
  const { rank, scale } = config.shapeOf(`${a.module}.${isGateUp ? 'gate_up_proj' : 'down_proj'}`)
  checkRank(key, rank, maxRank)
  expectShape(a.tensor, experts * rank, wholeA.cols, key)
  expectShape(b.tensor, wholeB.rows, experts * rank, key)
  const one = (module: AdapterModule, e: number, firstRow: number): PlannedModule => ({
    module,
    rank,
    scale,
    a: subTensor(a.tensor, { ...wholeA, rows: rank, offset: wholeA.offset + e * rank * wholeA.rowBytes }),
    b: subTensor(b.tensor, {
      rows: module.outSize,
      cols: rank,
      offset: wholeB.offset + firstRow * wholeB.rowBytes + e * wholeB.colBytes,
      rowBytes: wholeB.rowBytes,
      colBytes: experts * wholeB.colBytes
    }),
    indices: [a.index, b.index]
  })
  return isGateUp
    ? gate.flatMap((module, e) => [one(module, e, 0), one(up[e]!, e, module.outSize)])
    : down.map((module, e) => one(module, e, 0))
}

/** Experts of a layer share a row of the table, so their ranks and scales must be equal. */
function checkShared (modules: readonly PlannedModule[]): void {
  const rows = new Map<number, PlannedModule>()
  for (const planned of modules) {
    const { module, rank, scale } = planned
    const first = rows.get(module.row)
    if (first === undefined) rows.set(module.row, planned)
    else if (first.rank !== rank || first.scale !== scale) {
      throw refused(
        `${first.module.name} has rank ${first.rank} and scale ${first.scale}, ${module.name} rank ${rank} and scale ` +
          `${scale}: experts of a layer must have the same`
      )
    }
  }
}

function checkRank (name: string, rank: number, maxRank: number): void {
  if (rank <= maxRank) return
  throw refused(`${name} has rank ${rank}, and this server takes at most ${maxRank} (--max-lora-rank)`, 'r')
}

function expectShape (tensor: AnnouncedTensor, rows: number, cols: number, module: string): TensorView {
  const view = viewOf(tensor)
  if (view.rows === rows && view.cols === cols) return view
  throw refused(
    `tensor "${tensor.name}" has shape [${tensor.shape.join(', ')}], expected [${rows}, ${cols}] for ${module} with ` +
      'the rank of adapter_config.json',
    tensor.name
  )
}

function transposed ({ rows, cols, offset, rowBytes, colBytes }: TensorView): TensorView {
  return { rows: cols, cols: rows, offset, rowBytes: colBytes, colBytes: rowBytes }
}

function noRoom (module: string, tensor: string): RefitError {
  return refused(
    `${module} takes no adapters here: it is none of --lora-target-modules, or adapters are not computed for it`,
    tensor
  )
}

function refused (message: string, param?: string): RefitError {
  return new RefitError('ADAPTER_REFUSED', `LoRA adapter: ${message}`, param === undefined ? {} : { param })
}
