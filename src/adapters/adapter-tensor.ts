import { RefitError } from '../errors.ts'
import type { ModelTable } from '../model/architecture.ts'
import type { AnnouncedTensor, TensorPart } from '../contract/weight-source.ts'
import { bytesOf } from '../native/dtypes.ts'

// The tensors of an adapter, by PEFT's names (utils/save_and_load.py, tuners/lora/layer.py):
//   MODULE.lora_A.weight [r, in], MODULE.lora_B.weight [out, r]; in memory also MODULE.lora_A.NAME.weight
//   MODULE.lora_embedding_A [r, vocabulary], MODULE.lora_embedding_B [hidden, r]
//   fused experts: ....mlp.experts.base_layer.lora_A.weight for gate_up_proj, ....mlp.experts.lora_A.weight for
//   down_proj, or for the only one: A [E r, in], expert slow; B [out, r E], expert fast

/** One half of one module's adapter, as the name of a tensor tells it. */
export interface HalfName {
  /** The module's checkpoint name without `.weight`; of fused experts the name that ends in `.experts`. */
  module: string
  half: 'a' | 'b'
  kind: 'linear' | 'embedding' | 'experts'
  /** Fused experts: named with `base_layer`. */
  isInner: boolean
}

/** One half as a source announces it. */
export interface AdapterHalf extends HalfName {
  tensor: AnnouncedTensor
  /** Its place in the list of tensors. */
  index: number
}

const LINEAR = /^(.+)\.lora_([AB])(?:\.[^.]+)?\.weight$/
const EMBEDDING = /^(.+)\.lora_embedding_([AB])(?:\.[^.]+)?$/
const EMBEDDING_COPY = /^(.+\.embed_tokens|(?:.+\.)?lm_head)\.base_layer\.weight$/
const EXPERTS = /^(.+\.experts)(\.base_layer)?$/

/** The half that a tensor is; null if it is no half of an adapter of this model. */
export function adapterHalf (tensor: AnnouncedTensor, index: number, table: ModelTable): AdapterHalf | null {
  const name = readName(tensor.name, table)
  return name === null ? null : { ...name, tensor, index }
}

function readName (tensor: string, table: ModelTable): HalfName | null {
  const linear = LINEAR.exec(tensor)
  const match = linear ?? EMBEDDING.exec(tensor)
  if (match === null) return null
  const [, path, letter] = match as unknown as [string, string, 'A' | 'B']
  const half = letter === 'A' ? 'a' : 'b'
  const [, experts, inner] = linear === null ? [] : EXPERTS.exec(path) ?? []
  if (experts !== undefined) {
    const name = canonical(`${experts}.gate_up_proj`, table)
    if (name === null) return null
    return {
      module: name.slice(0, -'.gate_up_proj'.length),
      half,
      kind: 'experts',
      isInner: inner !== undefined
    }
  }
  const weight = canonical(`${path}.weight`, table)
  if (weight === null) return null
  const module = weight.slice(0, -'.weight'.length)
  const isEmbedding = module.endsWith('embed_tokens')
  if (isEmbedding !== (linear === null)) return null
  return { module, half, kind: isEmbedding ? 'embedding' : 'linear', isInner: false }
}

/**
 * The module whose base weight a tensor repeats, or null. Beside adapters of embeddings and heads, PEFT saves their
 * frozen base weights (save_embedding_layers).
 */
export function embeddingCopy ({ name }: AnnouncedTensor, table: ModelTable): string | null {
  const [, path] = EMBEDDING_COPY.exec(name) ?? []
  return path === undefined ? null : canonical(`${path}.weight`, table)?.slice(0, -'.weight'.length) ?? null
}

/** The model's own spelling of a weight's name; a tied head has one as well. */
function canonical (name: string, table: ModelTable): string | null {
  const known = table.canonical(name)
  return table.tensors.has(known) || table.ignored(known) ? known : null
}

/** Row r and column c of a tensor of two dimensions: byte `offset + r * rowBytes + c * colBytes` of its source. */
export interface TensorView {
  rows: number
  cols: number
  offset: number
  rowBytes: number
  colBytes: number
}

/** Throws ADAPTER_REFUSED for a tensor that is not of two dimensions or lies in several parts. */
export function viewOf ({ name, dtype, shape, offset, parts }: AnnouncedTensor): TensorView {
  if (shape.length !== 2) {
    throw new RefitError(
      'ADAPTER_REFUSED',
      `tensor "${name}" has shape [${shape.join(', ')}], expected two dimensions`,
      {
        param: name
      }
    )
  }
  const [rows, cols] = shape as [number, number]
  const colBytes = bytesOf(dtype)
  if (parts === undefined) return { rows, cols, offset, rowBytes: cols * colBytes, colBytes }
  if (parts.length !== 1) {
    throw new RefitError('ADAPTER_REFUSED', `tensor "${name}" lies in ${parts.length} parts; send it contiguous`, {
      param: name
    })
  }
  return { ...parts[0]!, rows, cols }
}

/** A part of a source's tensor as a tensor of its own. */
export function subTensor (tensor: AnnouncedTensor, view: TensorView): AnnouncedTensor {
  const { rows, cols, offset, rowBytes, colBytes } = view
  const { name, dtype, source, ranks } = tensor
  const isPacked = colBytes === bytesOf(dtype) && rowBytes === cols * colBytes
  const part: TensorPart = { firstRow: 0, rows, cols, offset, rowBytes, colBytes }
  return {
    name,
    dtype,
    shape: [rows, cols],
    source,
    offset,
    ...isPacked ? {} : { parts: [part] },
    ...ranks === undefined ? {} : { ranks }
  }
}
