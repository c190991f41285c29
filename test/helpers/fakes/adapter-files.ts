import { mkdirSync, mkdtempSync, realpathSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { encodeHeader } from '../../../src/wire/safetensors/encode.ts'

export const Q = 'base_model.model.model.layers.0.self_attn.q_proj'
export const CONFIG = { peft_type: 'LORA', r: 1, lora_alpha: 2, target_modules: ['q_proj'] }

/** A safetensors file with a pair of float32 matrices whose elements all have one value. */
export function adapterBytes (value: number): Buffer {
  const header = encodeHeader([
    { name: `${Q}.lora_A.weight`, dtype: 'F32', shape: [1, 2] },
    { name: `${Q}.lora_B.weight`, dtype: 'F32', shape: [2, 1] }
  ])
  return Buffer.concat([header, Buffer.from(Float32Array.of(value, value, value, value).buffer)])
}

/** A folder inside a new root, as PEFT saves an adapter. Returns both. */
export function adapterFolder (
  { value = 1, config = CONFIG, name = 'policy' }: { value?: number, config?: unknown, name?: string } = {}
): { root: string, folder: string } {
  const root = realpathSync(mkdtempSync(join(tmpdir(), 'refit-adapter-')))
  const folder = join(root, name)
  mkdirSync(folder)
  writeFileSync(join(folder, 'adapter_config.json'), typeof config === 'string' ? config : JSON.stringify(config))
  writeFileSync(join(folder, 'adapter_model.safetensors'), adapterBytes(value))
  return { root, folder }
}
