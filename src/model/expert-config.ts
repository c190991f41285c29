import type { Architecture } from './architecture.ts'
import type { ConfigFields } from './config-fields.ts'
import type { Family } from './families.ts'
import { MAX_EXPERTS, MAX_WIDTH } from './limits.ts'

type Experts = Pick<
  Architecture,
  'sparseLayers' | 'experts' | 'expertsPerToken' | 'expertIntermediateSize' | 'normTopkProb'
>

/** The mixture of experts of a model; zeros if no layer has experts. */
export function parseExperts (fields: ConfigFields, family: Family, layers: number): Experts {
  const experts = family.experts ? countExperts(fields) : 0
  const sparseLayers = experts === 0 ? new Uint8Array(layers) : parseSparseLayers(fields, layers)
  if (!sparseLayers.includes(1)) {
    return { sparseLayers, experts: 0, expertsPerToken: 0, expertIntermediateSize: 0, normTopkProb: false }
  }
  return {
    sparseLayers,
    experts,
    expertsPerToken: fields.int('num_experts_per_tok', 1, experts),
    expertIntermediateSize: fields.int('moe_intermediate_size', 1, MAX_WIDTH),
    normTopkProb: fields.boolean('norm_topk_prob', false)
  }
}

function countExperts (fields: ConfigFields): number {
  // transformers 5 writes num_local_experts.
  const names = ['num_experts', 'num_local_experts'].filter(n => fields.get(n) !== undefined)
  const [experts, other] = (names.length === 0 ? ['num_experts'] : names).map(n => fields.int(n, 0, MAX_EXPERTS))
  if (other !== undefined && other !== experts) {
    throw fields.error('num_local_experts', `${other} contradicts num_experts ${experts}`)
  }
  return experts!
}

function parseSparseLayers (fields: ConfigFields, layers: number): Uint8Array {
  const step = fields.int('decoder_sparse_step', 1, MAX_WIDTH, 1)
  const dense = new Set(fields.ints('mlp_only_layers', 0, MAX_WIDTH))
  return Uint8Array.from({ length: layers }, (_, i) => !dense.has(i) && (i + 1) % step === 0 ? 1 : 0)
}
