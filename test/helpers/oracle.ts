import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import type { Architecture } from '../../src/model/architecture.ts'
import type { Activation } from '../../src/native/recipe.ts'
import { FAMILIES } from '../../src/model/families.ts'
import { headerLength, parseHeader } from '../../src/wire/safetensors/header.ts'
import { toDType } from '../../src/wire/safetensors/dtypes.ts'
import type { CheckpointTensor } from './make-checkpoint.ts'
import { decodeValues } from './dtype-values.ts'

// A second implementation of every model: the forward pass in float64, written for reading, with no cache, batch, shard
// or fused weight. Formulas as in transformers' modeling_{llama,mistral,olmo2,qwen2,qwen3,qwen3_moe}.py;
// goldens.test.ts checks it against transformers itself.

/** Checkpoint name to elements, row-major. */
export type OracleWeights = Map<string, Float64Array>

/** All tensors in the safetensors files of a folder. */
export function readWeights (folder: string): OracleWeights {
  const weights: OracleWeights = new Map()
  for (const file of readdirSync(folder).filter(name => name.endsWith('.safetensors'))) {
    const bytes = readFileSync(join(folder, file))
    const { tensors } = parseHeader(bytes.subarray(8, 8 + headerLength(bytes, bytes.length, file)), bytes.length, file)
    for (const { name, dtype, begin, end } of tensors) {
      weights.set(
        name,
        decodeValues(toDType(dtype)!, bytes.subarray(begin, end))
      )
    }
  }
  return weights
}

/** The same for a checkpoint in memory (make-checkpoint.ts). */
export function weightsOf (tensors: readonly CheckpointTensor[]): OracleWeights {
  return new Map(tensors.map(({ name, dtype, data }) => [name, decodeValues(dtype, data)]))
}

const ACTIVATIONS: Record<Activation, (x: number) => number> = {
  silu: x => x / (1 + Math.exp(-x)),
  gelu_pytorch_tanh: x => x / 2 * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)))
}

type Norms = Record<'attention' | 'mlp', (x: Float64Array) => Float64Array>

export class Oracle {
  readonly #arch: Architecture
  readonly #weights: OracleWeights

  constructor (arch: Architecture, weights: OracleWeights) {
    this.#arch = arch
    this.#weights = weights
  }

  /** Logits [vocabSize] after each token. */
  logits (tokens: readonly number[]): Float64Array[] {
    const { hiddenSize, layers, tieWordEmbeddings, vocabSize } = this.#arch
    const embed = this.#get('model.embed_tokens.weight')
    const states = tokens.map(token => embed.slice(token * hiddenSize, (token + 1) * hiddenSize))
    for (let layer = 0; layer < layers; layer++) {
      const at = `model.layers.${layer}.`
      const [pre, post] = this.#layerNorms(at)
      const attended = this.#attention(at + 'self_attn.', states.map(pre.attention))
      states.forEach((x, t) => {
        addTo(x, post.attention(attended[t]!))
      })
      for (const x of states) addTo(x, post.mlp(this.#feedForward(layer, pre.mlp(x))))
    }
    const head = tieWordEmbeddings ? embed : this.#get('lm_head.weight')
    return states.map(x => multiply(head, this.#norm(x, 'model.norm.weight'), vocabSize))
  }

  /**
   * The `count` most likely tokens one after another, lowest id on ties, and the distance of each to the second best.
   */
  greedy (prompt: readonly number[], count: number): { tokens: number[], gaps: number[] } {
    const tokens: number[] = []
    const gaps: number[] = []
    for (let i = 0; i < count; i++) {
      const last = this.logits([...prompt, ...tokens]).at(-1)!
      const best = last.indexOf(Math.max(...last))
      gaps.push(last[best]! - Math.max(...last.filter((_, id) => id !== best)))
      tokens.push(best)
    }
    return { tokens, gaps }
  }

  /** Logprobs at `temperature` of tokens 1.., each given all before it. */
  logprobs (tokens: readonly number[], temperature = 1): number[] {
    const every = this.logits(tokens)
    return tokens.slice(1).map((token, i) => logSoftmax(every[i]!, temperature)[token]!)
  }

  #get (name: string): Float64Array {
    const values = this.#weights.get(name)
    if (values === undefined) throw new Error(`the checkpoint lacks ${name}`)
    return values
  }

  #norm (x: Float64Array, name: string): Float64Array {
    const weight = this.#get(name)
    const mean = x.reduce((sum, v) => sum + v * v, 0) / x.length
    const scale = 1 / Math.sqrt(mean + this.#arch.rmsNormEps)
    return x.map((v, i) => v * scale * weight[i]!)
  }

  /** The norms before and after attention and MLP. */
  #layerNorms (at: string): [Norms, Norms] {
    const { attention, mlp } = FAMILIES[this.#arch.name].norms
    const norms: Norms = {
      attention: x => this.#norm(x, `${at}${attention}.weight`),
      mlp: x => this.#norm(x, `${at}${mlp}.weight`)
    }
    const none: Norms = { attention: x => x, mlp: x => x }
    return this.#arch.normPlacement === 'pre' ? [norms, none] : [none, norms]
  }

  #linear (name: string, x: Float64Array, rows: number, bias = false): Float64Array {
    const y = multiply(this.#get(name + '.weight'), x, rows)
    if (bias) addTo(y, this.#get(name + '.bias'))
    return y
  }

  #attention (at: string, inputs: Float64Array[]): Float64Array[] {
    const { heads, kvHeads, headDim, hiddenSize, qkNorm, qkvBias, oBias } = this.#arch
    const project = (name: string, count: number): Float64Array[] =>
      inputs.map(x => this.#linear(at + name, x, count * headDim, qkvBias))
    const rotated = (all: Float64Array[], norm: string): Float64Array[][] =>
      all.map((whole, position) =>
        split(qkNorm === 'projection' ? this.#norm(whole, at + norm) : whole, headDim)
          .map(head => this.#rotate(qkNorm === 'head' ? this.#norm(head, at + norm) : head, position))
      )
    const q = rotated(project('q_proj', heads), 'q_norm.weight')
    const k = rotated(project('k_proj', kvHeads), 'k_norm.weight')
    const v = project('v_proj', kvHeads).map(whole => split(whole, headDim))
    return inputs.map((_, t) => {
      const out = new Float64Array(heads * headDim)
      for (let h = 0; h < heads; h++) {
        const kv = Math.floor(h / (heads / kvHeads))
        const scores = Float64Array.from({ length: t + 1 }, (_, s) => dot(q[t]![h]!, k[s]![kv]!) / Math.sqrt(headDim))
        softmax(scores).forEach((p, s) => {
          for (let d = 0; d < headDim; d++) out[h * headDim + d]! += p * v[s]![kv]![d]!
        })
      }
      return this.#linear(at + 'o_proj', out, hiddenSize, oBias)
    })
  }

  /** RoPE in halves: element i turns with element i + headDim / 2. */
  #rotate (head: Float64Array, position: number): Float64Array {
    const { ropeInvFreq: invFreq, ropeScale: scale } = this.#arch
    const half = head.length / 2
    const out = new Float64Array(head.length)
    for (let i = 0; i < half; i++) {
      const [cos, sin] = [Math.cos(position * invFreq[i]!) * scale, Math.sin(position * invFreq[i]!) * scale]
      out[i] = head[i]! * cos - head[i + half]! * sin
      out[i + half] = head[i + half]! * cos + head[i]! * sin
    }
    return out
  }

  #feedForward (layer: number, x: Float64Array): Float64Array {
    const { sparseLayers, experts, expertsPerToken, normTopkProb, intermediateSize, hiddenSize } = this.#arch
    const at = `model.layers.${layer}.mlp.`
    if (sparseLayers[layer] !== 1) return this.#mlp(at, x, intermediateSize)
    const router = softmax(this.#linear(at + 'gate', x, experts))
    const chosen = [...router.keys()].sort((a, b) => router[b]! - router[a]! || a - b).slice(0, expertsPerToken)
    const total = normTopkProb ? chosen.reduce((sum, e) => sum + router[e]!, 0) : 1
    const y = new Float64Array(hiddenSize)
    for (const e of chosen) {
      addTo(
        y,
        this.#mlp(`${at}experts.${e}.`, x, this.#arch.expertIntermediateSize).map(v => v * router[e]! / total)
      )
    }
    return y
  }

  #mlp (at: string, x: Float64Array, width: number): Float64Array {
    const up = this.#linear(at + 'up_proj', x, width)
    const act = ACTIVATIONS[this.#arch.activation]
    const gated = this.#linear(at + 'gate_proj', x, width).map((g, i) => act(g) * up[i]!)
    return this.#linear(at + 'down_proj', gated, this.#arch.hiddenSize)
  }
}

export function logSoftmax (logits: Float64Array, temperature = 1): Float64Array {
  const max = Math.max(...logits)
  const sum = logits.reduce((total, x) => total + Math.exp((x - max) / temperature), 0)
  return logits.map(x => (x - max) / temperature - Math.log(sum))
}

function softmax (x: Float64Array): Float64Array {
  return logSoftmax(x).map(Math.exp)
}

function dot (a: Float64Array, b: Float64Array): number {
  return a.reduce((sum, v, i) => sum + v * b[i]!, 0)
}

/** matrix [rows, x.length] times x. */
function multiply (matrix: Float64Array, x: Float64Array, rows: number): Float64Array {
  if (matrix.length !== rows * x.length) {
    throw new Error(`a matrix of ${matrix.length} elements is not [${rows}, ${x.length}]`)
  }
  const y = new Float64Array(rows)
  for (let r = 0, at = 0; r < rows; r++) {
    let sum = 0
    for (let c = 0; c < x.length; c++) sum += matrix[at++]! * x[c]!
    y[r] = sum
  }
  return y
}

function addTo (target: Float64Array, more: Float64Array): void {
  for (let i = 0; i < target.length; i++) target[i]! += more[i]!
}

function split (x: Float64Array, size: number): Float64Array[] {
  return Array.from({ length: x.length / size }, (_, i) => x.subarray(i * size, (i + 1) * size))
}
