import type { AdapterSlots, AdapterTarget } from './adapter-slots.ts'
import { ADAPTER_TARGETS, tableRow } from './adapter-slots.ts'
import type { Architecture, Param, Rect, TensorEntry } from './architecture.ts'

/** A module that takes adapters: its linear, and the places of its A and B in a slot. */
export interface AdapterModule {
  /** Its name in checkpoints, without `.weight`. */
  name: string
  target: AdapterTarget
  /** Row in its slot's part of `adapters.table`. Experts of a layer share one. */
  row: number
  /** Columns of A and rows of B; an embedding's A is [r, vocabulary] and its B is [hidden, r]. */
  inSize: number
  outSize: number
  /**
   * The rectangles of rows [from, to) of A in a slot. Source rows count from `from`; an embedding's A is transposed,
   * and its source columns count from `from`.
   */
  a: (slot: number, from: number, to: number) => Rect[]
  /** The same for columns [from, to) of B. */
  b: (slot: number, from: number, to: number) => Rect[]
}

/** The places of a linear's A and B: parameter ids, and the first row of A in a slot. */
interface Pair {
  a: number
  b: number
  /** Rows of A and B that one slot takes. */
  aRows: number
  bRows: number
  /** First row of A, from the slot's first. */
  at: number
}

/**
 * Every module of a model that slots have room for, by name. Places follow from the base weight's own rectangles: B is
 * split like the weight's rows and A like its columns.
 */
export function adapterModules (
  arch: Architecture,
  tensors: ReadonlyMap<string, TensorEntry>,
  params: readonly Param[],
  slots: AdapterSlots
): Map<string, AdapterModule> {
  const ids = new Map(params.map(({ name }, id) => [name, id]))
  const modules = new Map<string, AdapterModule>()
  for (const entry of tensors.values()) {
    const name = moduleOf(entry.name)
    if (entry.alternative || name === null) continue
    const [target, layer] = name
    if (slots.targets.has(target)) add(entry.name.slice(0, -'.weight'.length), target, layer, entry)
  }
  const embed = tensors.get('model.embed_tokens.weight')!
  if (arch.tieWordEmbeddings && slots.targets.has('lm_head')) add('lm_head', 'lm_head', 0, embed)
  return modules

  function add (name: string, target: AdapterTarget, layer: number, entry: TensorEntry): void {
    const pair = pairOf(name, target, entry)
    const isEmbedding = target === 'embed_tokens'
    const places = isEmbedding ? embeddingPlaces : linearPlaces
    modules.set(name, {
      name,
      target,
      row: tableRow(arch, target, layer),
      inSize: isEmbedding ? entry.rows : entry.cols,
      outSize: isEmbedding ? entry.cols : entry.rows,
      ...places(entry, pair)
    })
  }

  function pairOf (name: string, target: AdapterTarget, entry: TensorEntry): Pair {
    const base = target === 'lm_head' ? 'lm_head' : params[entry.rects[0]!.param]!.name
    const [a, b] = [ids.get(`adapters.${base}_a`)!, ids.get(`adapters.${base}_b`)!]
    const expert = Number(/\.experts\.(\d+)\./.exec(name)?.[1] ?? 0)
    const slices = /qkv$/.test(base) ? 3 : /(gate_up|w13)$/.test(base) ? 2 : 1
    const slice = { k_proj: 1, v_proj: 2, up_proj: 1 }[target as string] ?? 0
    return {
      a,
      b,
      aRows: params[a]!.rows / slots.slots,
      bRows: params[b]!.rows / slots.slots,
      at: (expert * slices + slice) * slots.rank
    }
  }
}

/** The target and the layer of a weight that can take adapters. */
function moduleOf (name: string): [AdapterTarget, number] | null {
  const [, layer, last] = /^(?:model\.layers\.(\d+)\..+\.|model\.|)(\w+)\.weight$/.exec(name) ?? []
  const target = ADAPTER_TARGETS.find(known => known === last)
  return target === undefined ? null : [target, Number(layer ?? 0)]
}

function linearPlaces ({ rects }: TensorEntry, pair: Pair): Pick<AdapterModule, 'a' | 'b'> {
  return {
    a: (slot, from, to) =>
      rects.map(({ rank, srcCol, cols, dstCol }) => ({
        rank,
        param: pair.a,
        srcRow: 0,
        srcCol,
        rows: to - from,
        cols,
        dstRow: slot * pair.aRows + pair.at + from,
        dstCol
      })),
    b: (slot, from, to) =>
      rects.map(({ rank, srcRow, rows, dstRow }) => ({
        rank,
        param: pair.b,
        srcRow,
        srcCol: 0,
        rows,
        cols: to - from,
        dstRow: slot * pair.bRows + dstRow,
        dstCol: from
      }))
  }
}

function embeddingPlaces ({ rects, cols: hidden }: TensorEntry, pair: Pair): Pick<AdapterModule, 'a' | 'b'> {
  return {
    a: (slot, from, to) =>
      rects.map(({ rank, srcRow, rows, dstRow }) => ({
        rank,
        param: pair.a,
        srcRow,
        srcCol: 0,
        rows,
        cols: to - from,
        dstRow: slot * pair.aRows + dstRow,
        dstCol: from
      })),
    b: (slot, from, to) =>
      rects.map(({ rank }) => ({
        rank,
        param: pair.b,
        srcRow: 0,
        srcCol: 0,
        rows: hidden,
        cols: to - from,
        dstRow: slot * pair.bRows,
        dstCol: from
      }))
  }
}
