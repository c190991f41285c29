import { Type } from 'typebox'
import type { EngineInfo, ExpertLayout } from '../../contract/rollout-engine.ts'
import { RefitError } from '../../errors.ts'
import { invalid } from '../refuse.ts'
import type { Sample } from './sample.ts'
import { nullable } from '../schemas.ts'

// Reports which experts each token of a sample was routed to, for trainers that replay the routing (R3: Ma et al.,
// 2025, arXiv:2510.11370). Rows are the tokens from some position on, prompt and output, except the last token, for
// which nothing was computed.

/** SGLang's fields of requests. */
export const routedExpertsFields = {
  return_routed_experts: nullable(
    Type.Boolean(),
    'Return the experts that each token of prompt and output was routed to, except the last token. ' +
      'For mixtures of experts, on servers with --enable-return-routed-experts.'
  ),
  routed_experts_start_len: nullable(
    Type.Integer({ minimum: 0 }),
    'First position whose experts are returned, at most the number of prompt tokens (default 0).'
  )
}

/** Base64 of int32 [rows, layers, experts per token], best expert first; zeros in layers that have none. */
export const RoutedExperts = Type.String({
  description: 'Base64 of int32 [tokens - 1 - start, layers, experts per token], best expert first; ' +
    'zeros in layers without experts.'
})

/** Experts requested for a sample: how they are recorded, and the first position. */
export interface WantedExperts {
  layout: ExpertLayout
  from: number
}

/** The request of a body; null for none. Throws UNSUPPORTED if the engine records no experts. */
export function wantedExperts (
  body: { return_routed_experts?: unknown, routed_experts_start_len?: number | null },
  prompts: readonly ArrayLike<number>[],
  info: EngineInfo
): WantedExperts | null {
  if (body.return_routed_experts !== true) return null
  const layout = requireExperts(info, 'return_routed_experts')
  const from = body.routed_experts_start_len ?? 0
  checkStart(from, prompts, 'routed_experts_start_len')
  return { layout, from }
}

export function requireExperts ({ experts, architecture }: EngineInfo, param: string): ExpertLayout {
  if (experts !== undefined) return experts
  const why = /moe/i.test(architecture)
    ? 'routed experts are not recorded by this engine; start the server with --enable-return-routed-experts, or ' +
      'leave the field out'
    : `routed experts of ${architecture} are not supported by this server: it is no mixture of experts; ` +
      'leave the field out'
  throw new RefitError('UNSUPPORTED', `${param}: ${why}`, { param })
}

export function checkStart (from: number, prompts: readonly ArrayLike<number>[], param: string): void {
  const least = Math.min(...prompts.map(({ length }) => length))
  if (from > least) throw invalid(param, `${from} is higher than the number of input tokens ${least}`)
}

/** [rows, layers, experts per token] of the whole model. */
export function allLayers<T extends Uint8Array | Uint16Array | Int32Array> (
  experts: Uint16Array,
  { layers, sparse, perToken }: ExpertLayout,
  Values: new(length: number) => T
): T {
  const width = sparse.length * perToken
  const rows = experts.length / width
  const all = new Values(rows * layers * perToken)
  if (sparse.length === layers) {
    all.set(experts)
    return all
  }
  for (let row = 0; row < rows; row++) {
    for (const [i, layer] of sparse.entries()) {
      const begin = row * width + i * perToken
      all.set(experts.subarray(begin, begin + perToken), (row * layers + layer) * perToken)
    }
  }
  return all
}

/** Experts as SGLang sends them; undefined if the sample has none. */
export function sglangExperts ({ experts }: Sample, wanted: WantedExperts | null): string | undefined {
  return experts === null || wanted === null ? undefined : base64(allLayers(experts, wanted.layout, Int32Array))
}

/** SGLang's extension of OpenAI's replies: the experts of the first sample that has some. */
export function sglext (
  samples: readonly Sample[],
  wanted: WantedExperts | null
): { sglext?: { routed_experts: string } } {
  for (const sample of samples) {
    const experts = sglangExperts(sample, wanted)
    if (experts !== undefined) return { sglext: { routed_experts: experts } }
  }
  return {}
}

export const Sglext = Type.Optional(
  Type.Object({ routed_experts: Type.Optional(RoutedExperts) }, {
    title: 'Sglext',
    description: "What SGLang adds. Of several choices each has its own, and the reply the first one's."
  })
)

export function base64 (values: Uint8Array | Uint16Array | Int32Array): string {
  return Buffer.from(values.buffer, values.byteOffset, values.byteLength).toString('base64')
}
