import { performance } from 'node:perf_hooks'
import { parseModelConfig } from '../src/model/parse-config.ts'
import { buildModelTable } from '../src/model/model-table.ts'
import type { ShardAnnouncement, ShardLayout } from '../src/shards/announcement.ts'
import { ShardPlans } from '../src/shards/shard-plans.ts'
import { report } from './lib/table.ts'
import type { Figure } from './lib/table.ts'

// The time to compile the plan of a 30B-A3B from 16 ranks of a trainer to 8 of an engine, first and again, and how
// evenly the ranks send.

const WORLD = 16
const RANKS = 8
const LIMIT_MS = 1000
const CONFIG = {
  architectures: ['Qwen3MoeForCausalLM'],
  model_type: 'qwen3_moe',
  attention_bias: false,
  bos_token_id: 151643,
  eos_token_id: 151645,
  decoder_sparse_step: 1,
  dtype: 'bfloat16',
  head_dim: 128,
  hidden_act: 'silu',
  hidden_size: 2048,
  intermediate_size: 6144,
  max_position_embeddings: 40960,
  mlp_only_layers: [],
  moe_intermediate_size: 768,
  norm_topk_prob: true,
  num_attention_heads: 32,
  num_experts: 128,
  num_experts_per_tok: 8,
  num_hidden_layers: 48,
  num_key_value_heads: 4,
  rms_norm_eps: 1e-6,
  rope_theta: 1_000_000,
  tie_word_embeddings: false,
  use_sliding_window: false,
  vocab_size: 151936
}
const everyone = Array.from({ length: WORLD }, (_, rank) => rank)
const LAYOUTS: Array<{ name: string, layout: ShardLayout }> = [
  {
    name: 'FSDP2, 16 ranks',
    layout: { kind: 'mesh', shape: [WORLD], ranks: everyone, placements: [{ kind: 'shard', dim: 0, split: 1 }] }
  },
  {
    name: 'HSDP, 2 x 8',
    layout: {
      kind: 'mesh',
      shape: [2, WORLD / 2],
      ranks: everyone,
      placements: [{ kind: 'replicate' }, { kind: 'shard', dim: 0, split: 1 }]
    }
  }
]

const table = buildModelTable(parseModelConfig(CONFIG), RANKS)
const names = [...table.tensors.values()].filter(({ alternative }) => !alternative)
const figures: Figure[] = []
for (const { name, layout } of LAYOUTS) {
  const announced: ShardAnnouncement = {
    world: WORLD,
    layouts: [layout],
    tensors: names.map(({ name, shape }) => ({ name, shape, dtype: 'bfloat16', layout: 0 })),
    chunkBytes: 256 << 20,
    allowMissing: false
  }
  const plans = new ShardPlans(table)
  const began = performance.now()
  const { plan } = plans.announce(announced)
  const first = performance.now() - began
  plans.announce(announced)
  const again = performance.now() - began - first
  const { out } = plan.bytes
  const [least, most] = [Math.min(...out) / 1e9, Math.max(...out) / 1e9]
  figures.push({
    figure: `${name} to ${RANKS}: plan of ${plan.targets.length} tensors, ${plan.pieces.length} copies in ` +
      `${plan.classes} classes and ${plan.chunks.length} chunks; a rank sends ${least.toFixed(2)} to ` +
      `${most.toFixed(2)} GB`,
    ours: `${first.toFixed(0)} ms, known: ${again.toFixed(0)} ms`,
    other: `${LIMIT_MS} ms`,
    ratio: LIMIT_MS / first,
    goal: 1
  })
}
report('shards', figures)
