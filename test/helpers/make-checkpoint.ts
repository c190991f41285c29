import { createHash } from 'node:crypto'
import { mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import type { DType } from '../../src/native/dtypes.ts'
import type { Architecture } from '../../src/model/architecture.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { encodeSafetensors } from '../../src/wire/safetensors/encode.ts'
import { SAFETENSORS_NAMES } from '../../src/wire/safetensors/dtypes.ts'
import { encodeValues } from './dtype-values.ts'

/** The value of a checkpoint tensor at a flat index. */
export type Values = (name: string, index: number) => number

export interface CheckpointTensor {
  name: string
  dtype: DType
  shape: number[]
  data: Buffer
}

export interface CheckpointOptions {
  /** Default bfloat16; or one for each name. */
  dtype?: DType | ((name: string) => DType)
  /** Default `randomValues(1)`. */
  values?: Values
  /** Files; default 1 (`model.safetensors`, no index). */
  shards?: number
  /** Experts as transformers 5 keeps them in memory: two tensors per layer. */
  fusedExperts?: boolean
  /** Tensors to leave out. */
  omit?: (name: string) => boolean
}

/** The tensors of a checkpoint of `arch`, in the model's order. */
export function checkpointTensors (arch: Architecture, options: CheckpointOptions = {}): CheckpointTensor[] {
  const { dtype = 'bfloat16', values = randomValues(1), fusedExperts = false, omit } = options
  const isExpert = (name: string): boolean => name.includes('.mlp.experts.')
  return [...buildModelTable(arch, 1).tensors.values()]
    .filter(plan => isExpert(plan.name) ? plan.alternative === fusedExperts : true)
    .filter(plan => omit?.(plan.name) !== true)
    .map(({ name, shape, rows, cols }) => {
      const type = typeof dtype === 'string' ? dtype : dtype(name)
      return { name, dtype: type, shape, data: encodeValues(type, rows * cols, i => values(name, i)) }
    })
}

/** Writes safetensors files into `folder` (made if need be), several with an index. Returns their names. */
export function writeTensors (folder: string, tensors: CheckpointTensor[], shards = 1): string[] {
  mkdirSync(folder, { recursive: true })
  const write = (file: string, part: CheckpointTensor[]): void => {
    const entries = part.map(tensor => ({ ...tensor, dtype: SAFETENSORS_NAMES[tensor.dtype] }))
    writeFileSync(join(folder, file), encodeSafetensors(entries, { format: 'pt' }))
  }
  if (shards === 1) {
    write('model.safetensors', tensors)
    return ['model.safetensors']
  }
  const number = (n: number): string => String(n).padStart(5, '0')
  const files = Array.from({ length: shards }, (_, i) => `model-${number(i + 1)}-of-${number(shards)}.safetensors`)
  const weightMap: Record<string, string> = {}
  const perShard = Math.ceil(tensors.length / shards)
  files.forEach((file, i) => {
    const part = tensors.slice(i * perShard, (i + 1) * perShard)
    for (const { name } of part) weightMap[name] = file
    write(file, part)
  })
  const totalSize = tensors.reduce((sum, tensor) => sum + tensor.data.length, 0)
  writeFileSync(
    join(folder, 'model.safetensors.index.json'),
    JSON.stringify({ metadata: { total_size: totalSize }, weight_map: weightMap }, null, 2)
  )
  return files
}

/** A checkpoint of `arch` in `folder`: safetensors files only. Returns their names. */
export function writeCheckpoint (folder: string, arch: Architecture, options: CheckpointOptions = {}): string[] {
  return writeTensors(folder, checkpointTensors(arch, options), options.shards)
}

/** A model folder: config.json (see tiny-config.ts) and its checkpoint. Returns the architecture. */
export function writeModelFolder (
  folder: string,
  config: Record<string, unknown>,
  options: CheckpointOptions = {}
): Architecture {
  const arch = parseModelConfig(config)
  writeCheckpoint(folder, arch, options)
  writeFileSync(join(folder, 'config.json'), JSON.stringify(config, null, 2))
  return arch
}

/** Position-coded values that bfloat16, float16 and float32 hold exactly, with magnitudes from 2^-7 to 1. */
export function positionCoded (seed = 0): Values {
  return hashed(seed, hash => {
    const magnitude = (128 + (hash & 127)) / 128 * 2 ** -(1 + ((hash >>> 7) % 7))
    return (hash & 0x8000_0000) === 0 ? magnitude : -magnitude
  })
}

/** Normal noise, with norms around 1: such a model has distinct logits and does not overflow. */
export function randomValues (seed: number, std = 0.1): Values {
  const noise = hashed(
    seed,
    (hash, again) => Math.sqrt(-2 * Math.log((hash + 1) / 2 ** 32)) * Math.cos(2 * Math.PI * again / 2 ** 32)
  )
  return (name, index) => (/norm\.weight$/.test(name) ? 1 : 0) + std * noise(name, index)
}

function hashed (seed: number, value: (hash: number, again: number) => number): Values {
  const keys = new Map<string, number>()
  return (name, index) => {
    let key = keys.get(name)
    if (key === undefined) keys.set(name, key = createHash('sha256').update(`${seed}:${name}`).digest().readUInt32LE())
    const hash = mix(key ^ mix(index))
    return value(hash, mix(hash ^ 0x9e3779b9))
  }
}

// The finaliser of MurmurHash3, a bijection of 32 bits.
function mix (x: number): number {
  let h = x >>> 0
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b)
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35)
  return (h ^ (h >>> 16)) >>> 0
}
