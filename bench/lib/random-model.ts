import { closeSync, existsSync, mkdirSync, openSync, renameSync, rmSync, writeFileSync, writeSync } from 'node:fs'
import { join } from 'node:path'
import { tmpdir } from 'node:os'

/** REFIT_LAYERS makes a smaller model, for a machine whose cores are shared. */
const LAYERS = Number(process.env.REFIT_LAYERS ?? 10)

/**
 * Writes a Qwen3-shaped checkpoint of random bf16 weights, about 1.14e9 bytes, once; returns its folder. `seed` makes
 * another one.
 */
export function randomModel (seed = 1): string {
  const name = `refit-bench-qwen3-${seed}${LAYERS === 10 ? '' : `-${LAYERS}-layers`}`
  const folder = join(process.env.REFIT_BENCH_DIR ?? tmpdir(), name)
  if (existsSync(folder)) return folder
  const making = `${folder}.making`
  rmSync(making, { recursive: true, force: true })
  mkdirSync(making, { recursive: true })
  const tensors = shapes()
  writeFileSync(join(making, 'config.json'), JSON.stringify(CONFIG, null, 2))
  writeSafetensors(join(making, 'model.safetensors'), tensors, seed)
  renameSync(making, folder)
  return folder
}

const CONFIG = {
  architectures: ['Qwen3ForCausalLM'],
  model_type: 'qwen3',
  hidden_size: 2048,
  num_hidden_layers: LAYERS,
  num_attention_heads: 16,
  num_key_value_heads: 8,
  head_dim: 128,
  intermediate_size: 6144,
  vocab_size: 32000,
  rms_norm_eps: 1e-6,
  rope_theta: 1000000,
  max_position_embeddings: 4096,
  tie_word_embeddings: true,
  hidden_act: 'silu',
  attention_bias: false,
  torch_dtype: 'bfloat16',
  bos_token_id: 0,
  eos_token_id: 1
}

type Shape = [name: string, shape: number[]]

function shapes (): Shape[] {
  const { hidden_size: h, intermediate_size: i, head_dim: d, num_attention_heads: q, num_key_value_heads: kv } = CONFIG
  const layer = (n: number): Shape[] =>
    ([
      ['input_layernorm.weight', [h]],
      ['self_attn.q_proj.weight', [q * d, h]],
      ['self_attn.k_proj.weight', [kv * d, h]],
      ['self_attn.v_proj.weight', [kv * d, h]],
      ['self_attn.q_norm.weight', [d]],
      ['self_attn.k_norm.weight', [d]],
      ['self_attn.o_proj.weight', [h, q * d]],
      ['post_attention_layernorm.weight', [h]],
      ['mlp.gate_proj.weight', [i, h]],
      ['mlp.up_proj.weight', [i, h]],
      ['mlp.down_proj.weight', [h, i]]
    ] satisfies Shape[])
      .map(([name, shape]) => [`model.layers.${n}.${name}`, shape])
  return [
    ['model.embed_tokens.weight', [CONFIG.vocab_size, h]],
    ...Array.from({ length: CONFIG.num_hidden_layers }, (_, n) => layer(n)).flat(),
    ['model.norm.weight', [h]]
  ]
}

function writeSafetensors (path: string, tensors: Shape[], seed: number): void {
  let end = 0
  const header: Record<string, unknown> = {}
  for (const [name, shape] of tensors) {
    const begin = end
    end += 2 * shape.reduce((a, b) => a * b, 1)
    header[name] = { dtype: 'BF16', shape, data_offsets: [begin, end] }
  }
  let json = JSON.stringify(header)
  json += ' '.repeat((8 - json.length % 8) % 8)
  const length = Buffer.alloc(8)
  length.writeBigUInt64LE(BigInt(json.length))
  const file = openSync(path, 'w')
  writeSync(file, Buffer.concat([length, Buffer.from(json)]))
  const noise = uniformBf16(1 << 20, seed)
  for (const [name, shape] of tensors) {
    let left = shape.reduce((a, b) => a * b, 1)
    const data = shape.length === 1 ? new Uint16Array(left).fill(0x3f80) : noise
    // Each run of rows starts at another place of the noise, so no two rows are equal.
    for (let turn = name.length; left > 0; turn++) {
      const from = shape.length === 1 ? 0 : (turn * 7919) % 65536
      const part = data.subarray(from, Math.min(data.length, from + left))
      writeSync(file, new Uint8Array(part.buffer, part.byteOffset, part.byteLength))
      left -= part.length
    }
  }
  closeSync(file)
}

/** Uniform in about +-0.035, as bf16: the scale of a trained matrix of this width. */
function uniformBf16 (count: number, seed: number): Uint16Array {
  const out = new Uint16Array(count)
  const value = new Float32Array(1)
  const bits = new Uint32Array(value.buffer)
  let state = (seed * 2654435761) >>> 0
  for (let i = 0; i < count; i++) {
    state ^= state << 13
    state >>>= 0
    state ^= state >>> 17
    state ^= state << 5
    state >>>= 0
    value[0] = (state / 0x100000000 - 0.5) * 0.07
    out[i] = bits[0]! >>> 16
  }
  return out
}
