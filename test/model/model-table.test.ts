import fc from 'fast-check'
import t from 'tap'
import { ARCHITECTURES } from '../../src/model/families.ts'
import type { Architecture, ModelTable, Rect, TensorEntry } from '../../src/model/architecture.ts'
import { buildModelTable } from '../../src/model/model-table.ts'
import { parseModelConfig } from '../../src/model/parse-config.ts'
import { tinyArchitecture, tinyConfig } from '../helpers/tiny-config.ts'

const RANKS = [1, 2, 4, 8]

/** Any architecture that fits 8 ranks; small, so that tables can be painted element by element. */
const architectures = fc
  .record({
    name: fc.constantFrom(...ARCHITECTURES),
    kv: fc.constantFrom(1, 2, 4, 8),
    groups: fc.constantFrom(1, 2, 4),
    headDim: fc.constantFrom(2, 4, 6),
    hidden: fc.constantFrom(1, 3, 5, 8, 12, 16),
    intermediate: fc.integer({ min: 1, max: 3 }),
    vocab: fc.integer({ min: 1, max: 200 }),
    layers: fc.integer({ min: 1, max: 3 }),
    tied: fc.boolean(),
    bias: fc.boolean(),
    experts: fc.integer({ min: 1, max: 4 }),
    expertWidth: fc.integer({ min: 1, max: 2 }),
    denseLayers: fc.uniqueArray(fc.integer({ min: 0, max: 2 }))
  })
  .filter(({ kv, groups }) => kv * groups >= 8)
  .map(m =>
    parseModelConfig(tinyConfig(m.name, {
      num_key_value_heads: m.kv,
      num_attention_heads: m.kv * m.groups,
      head_dim: m.headDim,
      hidden_size: m.hidden,
      intermediate_size: m.intermediate * 8,
      vocab_size: m.vocab,
      num_hidden_layers: m.layers,
      layer_types: undefined,
      tie_word_embeddings: m.tied,
      attention_bias: m.bias,
      num_experts: m.experts,
      num_experts_per_tok: 1,
      moe_intermediate_size: m.expertWidth * 8,
      mlp_only_layers: m.denseLayers,
      rope_parameters: { rope_type: 'default', rope_theta: 10_000 }
    }))
  )

/** An architecture's table on some ranks, which gather activations if it is deterministic. */
const tables = fc
  .record({ arch: architectures, ranks: fc.constantFrom(...RANKS), deterministic: fc.boolean() })
  .filter(({ arch, ranks, deterministic }) => !deterministic || arch.hiddenSize % ranks === 0)
  .map(({ arch, ranks, deterministic }) => (
    { arch, ranks, table: buildModelTable(arch, ranks, undefined, null, deterministic) }
  ))

type Paint = Map<string, Int32Array>

/**
 * Writes the id of each tensor's elements into parameters of all ranks as the rectangles say: 1 + index of the element
 * in the whole checkpoint.
 */
function paint (table: ModelTable, plans: TensorEntry[], starts: Map<string, number>): Paint {
  const params: Paint = new Map()
  for (const [id, { rows, cols }] of table.params.entries()) {
    for (let rank = 0; rank < table.ranks; rank++) params.set(`${rank}/${id}`, new Int32Array(rows * cols))
  }
  for (const plan of plans) {
    for (const rect of plan.rects) paintRect(table, plan, rect, starts.get(plan.name)!, params)
  }
  return params
}

function paintRect (table: ModelTable, plan: TensorEntry, rect: Rect, start: number, params: Paint): void {
  const param = table.params[rect.param]!
  const target = params.get(`${rect.rank}/${rect.param}`)!
  const inside = (at: number, size: number, limit: number): boolean =>
    Number.isSafeInteger(at) && at >= 0 && size > 0 && at + size <= limit
  if (!inside(rect.srcRow, rect.rows, plan.rows) || !inside(rect.srcCol, rect.cols, plan.cols)) {
    throw new Error(`${plan.name}: a rectangle leaves the tensor`)
  }
  if (!inside(rect.dstRow, rect.rows, param.rows) || !inside(rect.dstCol, rect.cols, param.cols)) {
    throw new Error(`${plan.name}: a rectangle leaves ${param.name}`)
  }
  for (let r = 0; r < rect.rows; r++) {
    for (let c = 0; c < rect.cols; c++) {
      const to = (rect.dstRow + r) * param.cols + rect.dstCol + c
      if (target[to] !== 0) throw new Error(`${plan.name} overlaps in ${param.name} of rank ${rect.rank}`)
      target[to] = start + 1 + (rect.srcRow + r) * plan.cols + rect.srcCol + c
    }
  }
}

function startsOf (plans: TensorEntry[]): { starts: Map<string, number>, total: number } {
  const starts = new Map<string, number>()
  let total = 0
  for (const { name, rows, cols } of plans) {
    starts.set(name, total)
    total += rows * cols
  }
  return { starts, total }
}

/** Rows of a vocabulary parameter of a rank that exist. */
function realRows (arch: Architecture, name: string, rows: number, rank: number): number {
  return name === 'embed' || name === 'lm_head' ? Math.max(0, Math.min(rows, arch.vocabSize - rank * rows)) : rows
}

t.test('rectangles tile every parameter of every rank, and use every element of the checkpoint', async t => {
  fc.assert(
    fc.property(tables, ({ arch, table }) => {
      const plans = [...table.tensors.values()].filter(plan => !plan.alternative)
      const { starts, total } = startsOf(plans)
      const used = new Uint8Array(total + 1)
      for (const [key, values] of paint(table, plans, starts)) {
        const [rank, id] = key.split('/').map(Number) as [number, number]
        const { name, rows, cols } = table.params[id]!
        const real = realRows(arch, name, rows, rank) * cols
        values.forEach((value, i) => {
          if ((value === 0) !== (i >= real)) {
            throw new Error(`${name} of rank ${rank} has a ${value === 0 ? 'hole' : 'pad row that is written'} at ${i}`)
          }
          used[value] = 1
        })
      }
      if (used.indexOf(0, 1) !== -1) throw new Error('an element of the checkpoint is used by no rank')
    }),
    { numRuns: 150 }
  )
})

t.test('fused experts are written to the same elements as single experts', async t => {
  fc.assert(
    fc.property(tables.filter(({ arch }) => arch.experts > 0), ({ arch, table }) => {
      const { experts, expertIntermediateSize: width } = arch
      const all = [...table.tensors.values()]
      const { starts } = startsOf(all.filter(plan => plan.alternative))
      // A single expert's tensor is a run of rows of the fused one.
      for (const plan of all) {
        const match = /^(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight$/.exec(plan.name)
        if (match === null) continue
        const [, prefix, e, part] = match as unknown as [string, string, string, string]
        const row = part === 'down' ? Number(e) * arch.hiddenSize : (Number(e) * 2 + (part === 'up' ? 1 : 0)) * width
        starts.set(plan.name, starts.get(prefix + (part === 'down' ? 'down_proj' : 'gate_up_proj'))! + row * plan.cols)
        if (Number(e) >= experts) throw new Error('too many experts')
      }
      const expert = (plan: TensorEntry): boolean => plan.name.includes('.experts.')
      const single = paint(table, all.filter(plan => expert(plan) && !plan.alternative), starts)
      t.strictSame(paint(table, all.filter(plan => plan.alternative), starts), single)
    }),
    { numRuns: 60 }
  )
})

t.test('every part lies at its expected place in the fused parameters of two ranks', async t => {
  const table = buildModelTable(tinyArchitecture('Qwen2ForCausalLM'), 2)
  const rects = (name: string): unknown[] =>
    table.tensors.get(name)!.rects.map(({ param, ...rest }) => ({ param: table.params[param]!.name, ...rest }))
  const at = 'model.layers.1.self_attn.'
  t.same(rects(at + 'q_proj.weight'), [
    { rank: 0, param: 'layers.1.qkv', srcRow: 0, srcCol: 0, rows: 32, cols: 64, dstRow: 0, dstCol: 0 },
    { rank: 1, param: 'layers.1.qkv', srcRow: 32, srcCol: 0, rows: 32, cols: 64, dstRow: 0, dstCol: 0 }
  ])
  t.match(rects(at + 'k_proj.weight'), [{ srcRow: 0, rows: 16, dstRow: 32 }, { srcRow: 16, rows: 16, dstRow: 32 }])
  t.match(rects(at + 'v_proj.bias'), [{ param: 'layers.1.qkv_bias', srcRow: 0, rows: 16, cols: 1, dstRow: 48 }, {
    srcRow: 16,
    rows: 16,
    dstRow: 48
  }])
  t.match(rects(at + 'o_proj.weight'), [{ srcRow: 0, srcCol: 0, rows: 64, cols: 32, dstCol: 0 }, {
    srcCol: 32,
    rows: 64,
    cols: 32,
    dstCol: 0
  }])
  t.match(rects('model.layers.0.mlp.up_proj.weight'), [{ param: 'layers.0.gate_up', srcRow: 0, rows: 64, dstRow: 64 }, {
    srcRow: 64,
    rows: 64,
    dstRow: 64
  }])
  t.match(rects('model.layers.0.mlp.down_proj.weight'), [{ srcCol: 0, cols: 64 }, { srcCol: 64, cols: 64 }])
  t.match(rects('model.embed_tokens.weight'), [{ srcRow: 0, rows: 160 }, { srcRow: 160, rows: 160 }])
  t.match(rects('model.norm.weight'), [{ rank: 0, rows: 64, cols: 1 }, { rank: 1, rows: 64, cols: 1 }])
})

t.test('ranks that gather activations hold rows of o, down and every w2, and all their columns', async t => {
  const table = buildModelTable(tinyArchitecture('Qwen3MoeForCausalLM'), 2, undefined, null, true)
  const rows = (name: string): unknown[] => {
    const { cols, rects } = table.tensors.get(name)!
    t.ok(rects.every(rect => rect.cols === cols && rect.srcCol === 0 && rect.dstCol === 0), name)
    return rects.map(({ rank, srcRow, rows, dstRow }) => [rank, srcRow, rows, dstRow])
  }
  t.same(rows('model.layers.1.self_attn.o_proj.weight'), [[0, 0, 32, 0], [1, 32, 32, 0]])
  t.same(rows('model.layers.1.mlp.down_proj.weight'), [[0, 0, 32, 0], [1, 32, 32, 0]])
  t.same(rows('model.layers.0.mlp.experts.3.down_proj.weight'), [[0, 0, 32, 96], [1, 32, 32, 96]])
  t.same(rows('model.layers.0.mlp.experts.down_proj').slice(7, 9), [[0, 448, 32, 224], [1, 32, 32, 0]])
  const shapes = Object.fromEntries(table.params.map(({ name, rows, cols }) => [name, [rows, cols]]))
  t.match(shapes, { 'layers.1.o': [32, 64], 'layers.1.down': [32, 128], 'layers.0.w2': [8 * 32, 32] })
  t.same(
    buildModelTable(tinyArchitecture('Qwen3MoeForCausalLM'), 1, undefined, null, true).params,
    buildModelTable(tinyArchitecture('Qwen3MoeForCausalLM'), 1).params,
    'one rank has nothing to gather'
  )
})

t.test('KV heads are replicated to neighbouring ranks if there are fewer heads than ranks', async t => {
  const table = buildModelTable(tinyArchitecture('LlamaForCausalLM'), 4)
  const k = table.tensors.get('model.layers.0.self_attn.k_proj.weight')!
  t.same(k.rects.map(rect => [rect.rank, rect.srcRow, rect.rows, rect.dstRow]), [[0, 0, 16, 16], [1, 0, 16, 16], [
    2,
    16,
    16,
    16
  ], [3, 16, 16, 16]])
})

t.test('the vocabulary is padded to 64 and to the ranks; late ranks may hold padding only', async t => {
  const rows = (vocab: number, ranks: number): number[] => {
    const table = buildModelTable(
      tinyArchitecture('LlamaForCausalLM', {
        vocab_size: vocab,
        num_attention_heads: 24,
        num_key_value_heads: 24,
        intermediate_size: 96
      }),
      ranks
    )
    return [table.params[0]!.rows, ...table.tensors.get('lm_head.weight')!.rects.map(rect => rect.rows)]
  }
  t.same(rows(320, 1), [320, 320])
  t.same(rows(321, 1), [384, 321])
  t.same(rows(100, 4), [32, 32, 32, 32, 4])
  t.same(rows(64, 8), [8, 8, 8, 8, 8, 8, 8, 8, 8])
  t.same(rows(3, 2), [32, 3])
  t.same(rows(100, 3), [64, 64, 36], 'padded to 192')
})

t.test('parameters of one rank have the names and shapes of native/core/model.h', async t => {
  const shapes = (arch: Architecture, ranks: number): Record<string, number[]> =>
    Object.fromEntries(buildModelTable(arch, ranks).params.map(({ name, rows, cols }) => [name, [rows, cols]]))
  t.same(shapes(tinyArchitecture('Qwen3MoeForCausalLM', { num_hidden_layers: 2 }), 2), {
    embed: [160, 64],
    'layers.0.ln1': [64, 1],
    'layers.0.qkv': [64, 64],
    'layers.0.q_norm': [16, 1],
    'layers.0.k_norm': [16, 1],
    'layers.0.o': [64, 32],
    'layers.0.ln2': [64, 1],
    'layers.0.router': [8, 64],
    'layers.0.w13': [8 * 2 * 16, 64],
    'layers.0.w2': [8 * 64, 16],
    'layers.1.ln1': [64, 1],
    'layers.1.qkv': [64, 64],
    'layers.1.q_norm': [16, 1],
    'layers.1.k_norm': [16, 1],
    'layers.1.o': [64, 32],
    'layers.1.ln2': [64, 1],
    'layers.1.gate_up': [128, 64],
    'layers.1.down': [64, 64],
    norm: [64, 1],
    lm_head: [160, 64]
  })
  const biased = shapes(
    tinyArchitecture('LlamaForCausalLM', { attention_bias: true, tie_word_embeddings: true, num_hidden_layers: 1 }),
    1
  )
  t.same([biased['layers.0.qkv_bias'], biased['layers.0.o_bias'], biased.lm_head], [[128, 1], [64, 1], undefined])
})

t.test('checkpoint shapes are those of files: vectors 1-D, fused experts 3-D seen as a matrix', async t => {
  const { tensors } = buildModelTable(tinyArchitecture('Qwen3MoeForCausalLM'), 1)
  t.match(tensors.get('model.norm.weight'), { shape: [64], rows: 64, cols: 1, alternative: false })
  t.match(tensors.get('model.layers.0.mlp.experts.gate_up_proj'), {
    shape: [8, 64, 64],
    rows: 512,
    cols: 64,
    alternative: true
  })
  t.match(tensors.get('model.layers.0.mlp.experts.down_proj'), {
    shape: [8, 64, 32],
    rows: 512,
    cols: 32,
    alternative: true
  })
  t.match(tensors.get('model.layers.2.mlp.experts.7.down_proj.weight'), { shape: [64, 32], alternative: false })
  t.notOk(tensors.has('model.layers.1.mlp.experts.0.down_proj.weight'), 'layer 1 is dense')
})

const misfits: Array<[Record<string, unknown>, number, RegExp]> = [
  [{}, 3, /3 ranks do not divide 4 attention heads/],
  [{}, 8, /8 ranks do not divide 4 attention heads/],
  [
    { num_attention_heads: 12, num_key_value_heads: 4 },
    6,
    /4 KV heads \(num_key_value_heads\) can neither be split over nor replicated to 6 ranks/
  ],
  [{ intermediate_size: 126 }, 4, /4 ranks do not divide 126 columns of the MLP \(intermediate_size\)/],
  [{}, 0, /expected a positive number of ranks, got 0/],
  [{}, 1.5, /got 1.5/]
]
for (const [overrides, ranks, message] of misfits) {
  t.test(`${ranks} ranks for ${JSON.stringify(overrides)} are refused with the numbers`, async t => {
    t.throws(() => buildModelTable(tinyArchitecture('LlamaForCausalLM', overrides), ranks), {
      code: 'CONFIG',
      param: 'tp',
      message
    })
  })
}

t.test('experts that ranks do not divide are refused, the dense width only where a layer is dense', async t => {
  const moe = (overrides: Record<string, unknown>): Architecture => tinyArchitecture('Qwen3MoeForCausalLM', overrides)
  t.throws(() => buildModelTable(moe({ moe_intermediate_size: 31 }), 2), {
    code: 'CONFIG',
    message: /2 ranks do not divide 31 columns of an expert/
  })
  t.throws(() => buildModelTable(moe({ intermediate_size: 127 }), 2), {
    code: 'CONFIG',
    message: /127 columns of the MLP/
  })
  t.ok(buildModelTable(moe({ intermediate_size: 127, mlp_only_layers: [] }), 2))
})

t.test('a hidden size that ranks do not divide is refused only where they gather activations', async t => {
  const arch = tinyArchitecture('LlamaForCausalLM', { hidden_size: 66, head_dim: 16 })
  t.ok(buildModelTable(arch, 4))
  t.throws(() => buildModelTable(arch, 4, undefined, null, true), {
    code: 'CONFIG',
    message: /4 ranks do not divide 66 columns of the hidden state \(hidden_size\)/
  })
})

t.test('a model of 18,867 tensors on 8 ranks gets its table', async t => {
  const arch = tinyArchitecture('Qwen3MoeForCausalLM', {
    num_hidden_layers: 48,
    num_experts: 128,
    num_experts_per_tok: 8,
    mlp_only_layers: [],
    hidden_size: 2048,
    num_attention_heads: 32,
    num_key_value_heads: 4,
    moe_intermediate_size: 768,
    vocab_size: 151936
  })
  const plans = [...buildModelTable(arch, 8).tensors.values()]
  t.equal(plans.filter(plan => !plan.alternative).length, 48 * (128 * 3 + 9) + 3)
  t.equal(plans.filter(plan => plan.alternative).length, 96)
})
