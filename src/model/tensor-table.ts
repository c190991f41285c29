import type { Architecture, Param, TensorEntry } from './architecture.ts'
import { familyOf } from './families.ts'
import { qkNormRows } from './param-table.ts'
import type { RankSizes } from './rank-sizes.ts'
import { blockShards, colShards, replicated, rowShards, vocabShards } from './slices.ts'
import type { Slices } from './slices.ts'

/**
 * Every checkpoint name of an architecture, as Hugging Face has it and in its order, with its rectangles on all ranks.
 * The split is SGLang's: q, k, v, gate and up by rows, o and down by columns, the vocabulary by rows; norms, routers
 * and the bias of o are whole on every rank. Ranks that gather activations have o and down by rows, too.
 */
export function tensorTable (arch: Architecture, sizes: RankSizes, params: Param[]): Map<string, TensorEntry> {
  return new TensorTable(arch, sizes, params).build()
}

class TensorTable {
  readonly #arch: Architecture
  readonly #sizes: RankSizes
  readonly #params: Param[]
  readonly #ids: Map<string, number>
  readonly #tensors = new Map<string, TensorEntry>()

  constructor (arch: Architecture, sizes: RankSizes, params: Param[]) {
    this.#arch = arch
    this.#sizes = sizes
    this.#params = params
    this.#ids = new Map(params.map((param, id) => [param.name, id]))
  }

  build (): Map<string, TensorEntry> {
    const { hiddenSize, vocabSize, layers, name, sparseLayers, tieWordEmbeddings } = this.#arch
    const { ranks, vocab } = this.#sizes
    const { norms } = familyOf(name)
    this.#add(
      'model.embed_tokens.weight',
      [vocabSize, hiddenSize],
      vocabShards(ranks, { param: this.#id('embed') }, vocab)
    )
    for (let i = 0; i < layers; i++) {
      this.#attention(i)
      if (sparseLayers[i] === 1) this.#experts(i)
      else this.#mlp(i)
      for (const [name, param] of [[norms.attention, 'ln1'], [norms.mlp, 'ln2']] as const) {
        this.#add(
          `model.layers.${i}.${name}.weight`,
          [hiddenSize],
          replicated(ranks, { param: this.#id(`layers.${i}.${param}`) })
        )
      }
    }
    this.#add('model.norm.weight', [hiddenSize], replicated(ranks, { param: this.#id('norm') }))
    if (!tieWordEmbeddings) {
      this.#add('lm_head.weight', [vocabSize, hiddenSize], vocabShards(ranks, { param: this.#id('lm_head') }, vocab))
    }
    return this.#tensors
  }

  #id (name: string): number {
    return this.#ids.get(name)!
  }

  #add (name: string, shape: number[], slices: Slices, alternative = false): void {
    const cols = shape.length === 1 ? 1 : shape.at(-1)!
    const rows = shape.reduce((product, n) => product * n, 1) / cols
    const rects = slices(rows, cols)
    const { dtype } = this.#params[rects[0]!.param]!
    this.#tensors.set(name, { name, shape, rows, cols, rects, dtype, alternative })
  }

  #attention (i: number): void {
    const { hiddenSize, heads, kvHeads, headDim, qkvBias, oBias } = this.#arch
    const { ranks, kvReplicas, ...local } = this.#sizes
    const from = `model.layers.${i}.`
    const to = `layers.${i}.`
    const whole = (param: string): Slices => replicated(ranks, { param: this.#id(to + param) })
    const kvRow = local.heads * headDim
    const parts = [
      { name: 'q', rows: heads * headDim, dstRow: 0, replicas: 1 },
      { name: 'k', rows: kvHeads * headDim, dstRow: kvRow, replicas: kvReplicas },
      { name: 'v', rows: kvHeads * headDim, dstRow: kvRow + local.kvHeads * headDim, replicas: kvReplicas }
    ]
    for (const { name, rows, dstRow, replicas } of parts) {
      const shards = (param: string): Slices => rowShards(ranks, { param: this.#id(to + param), dstRow }, replicas)
      this.#add(`${from}self_attn.${name}_proj.weight`, [rows, hiddenSize], shards('qkv'))
      if (qkvBias) this.#add(`${from}self_attn.${name}_proj.bias`, [rows], shards('qkv_bias'))
    }
    this.#add(
      from + 'self_attn.o_proj.weight',
      [hiddenSize, heads * headDim],
      this.#outputShards(this.#id(to + 'o'))
    )
    if (oBias) this.#add(from + 'self_attn.o_proj.bias', [hiddenSize], whole('o_bias'))
    const norms = qkNormRows(this.#arch)
    if (norms === null) return
    this.#add(from + 'self_attn.q_norm.weight', [norms.q], whole('q_norm'))
    this.#add(from + 'self_attn.k_norm.weight', [norms.k], whole('k_norm'))
  }

  #mlp (i: number): void {
    const { hiddenSize, intermediateSize } = this.#arch
    const { ranks, intermediate } = this.#sizes
    const from = `model.layers.${i}.mlp.`
    const gateUp = this.#id(`layers.${i}.gate_up`)
    this.#add(from + 'gate_proj.weight', [intermediateSize, hiddenSize], rowShards(ranks, { param: gateUp }))
    this.#add(
      from + 'up_proj.weight',
      [intermediateSize, hiddenSize],
      rowShards(ranks, { param: gateUp, dstRow: intermediate })
    )
    this.#add(
      from + 'down_proj.weight',
      [hiddenSize, intermediateSize],
      this.#outputShards(this.#id(`layers.${i}.down`))
    )
  }

  #experts (i: number): void {
    const { hiddenSize, experts, expertIntermediateSize: width } = this.#arch
    const { ranks, expertIntermediate, gathers } = this.#sizes
    const from = `model.layers.${i}.mlp.`
    const [router, w13, w2] = ['router', 'w13', 'w2'].map(name => this.#id(`layers.${i}.${name}`)) as [
      number,
      number,
      number
    ]
    this.#add(from + 'gate.weight', [experts, hiddenSize], replicated(ranks, { param: router }))
    for (let e = 0; e < experts; e++) {
      const gate = e * 2 * expertIntermediate
      this.#add(
        `${from}experts.${e}.gate_proj.weight`,
        [width, hiddenSize],
        rowShards(ranks, { param: w13, dstRow: gate })
      )
      this.#add(
        `${from}experts.${e}.up_proj.weight`,
        [width, hiddenSize],
        rowShards(ranks, { param: w13, dstRow: gate + expertIntermediate })
      )
      this.#add(
        `${from}experts.${e}.down_proj.weight`,
        [hiddenSize, width],
        this.#outputShards(w2, e)
      )
    }
    // transformers 5 holds the experts of a layer in two tensors, and trainers send those.
    this.#add(
      from + 'experts.gate_up_proj',
      [experts, 2 * width, hiddenSize],
      blockShards(ranks, { param: w13 }, 2 * experts), // gate, up, gate, ...
      true
    )
    const down = gathers ? blockShards(ranks, { param: w2 }, experts) : colShards(ranks, { param: w2 })
    this.#add(from + 'experts.down_proj', [experts, hiddenSize, width], down, true)
  }

  /** The shards of a linear whose inputs the ranks have computed: o, down, or an expert's w2. */
  #outputShards (param: number, expert = 0): Slices {
    const { ranks, outputs, gathers } = this.#sizes
    return (gathers ? rowShards : colShards)(ranks, { param, dstRow: expert * outputs })
  }
}
