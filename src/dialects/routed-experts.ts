import { Type } from 'typebox'
import type { RouteContext } from '../http/context.ts'
import { allLayers, base64 } from '../http/sglang/routed-experts.ts'
import type { WantedExperts } from '../http/sglang/routed-experts.ts'
import type { Sample } from '../http/sample.ts'
import { encodeNpy } from '../wire/trainers/npy.ts'

/** vLLM's base64 of a .npy file; prime-rl's and SkyRL's objects with base64 of the bare values. */
export type ExpertsForm = 'vllm' | 'prime-rl' | 'skyrl'

const Packed = Type.Object({
  // First: prime-rl's client looks for `"routed_experts":{"data":"` in the bytes of a reply.
  data: Type.String({ description: 'Base64 of the values, in C order.' }),
  shape: Type.Array(Type.Integer(), { description: '[tokens - 1 - start, layers, experts per token]' }),
  start: Type.Optional(Type.Integer({ description: 'Position of the first row (prime-rl).' })),
  dtype: Type.String({ description: 'uint8; for ids above 255 uint16 (prime-rl) or int16 (SkyRL).' })
}, { title: 'PackedExperts' })

export const VllmExperts = Type.Union([
  Type.String({
    description: 'Base64 of a .npy file of uint8 or uint16 [tokens - 1 - start, layers, experts per token].'
  }),
  Packed,
  Type.Null()
], {
  description:
    'The experts that each token but the last was routed to, of prompt and output, best first, zeros in layers without experts; of servers with --enable-return-routed-experts.'
})

const UINT8_IDS = 256

/** Null where the sample has none. */
export function vllmExperts (
  { experts }: Sample,
  { wanted: { layout, from }, form }: { wanted: WantedExperts, form: ExpertsForm }
): unknown {
  if (experts === null) return null
  const shape = [experts.length / (layout.sparse.length * layout.perToken), layout.layers, layout.perToken]
  const values = (isWide: boolean): Uint8Array | Uint16Array =>
    isWide ? allLayers(experts, layout, Uint16Array) : allLayers(experts, layout, Uint8Array)
  if (form === 'vllm') return encodeNpy(values(layout.experts > UINT8_IDS), shape).toString('base64')
  // Both go by the ids that are there, and SkyRL refuses what is wider than it has to be.
  const isWide = experts.some(id => id >= UINT8_IDS)
  const data = base64(values(isWide))
  // Ids are below 2^15 (native/core/layout.cc), where both kinds of 16 bits are alike.
  if (form === 'skyrl') return { data, shape, dtype: isWide ? 'int16' : 'uint8' }
  return { data, shape, start: from, dtype: isWide ? 'uint16' : 'uint8' }
}

/** How /inference/v1/generate answers: requests do not tell prime-rl from others, so the server's owner does. */
export function expertsForm ({ dialects }: RouteContext): ExpertsForm {
  return dialects.has('prime-rl') && !dialects.has('vllm') ? 'prime-rl' : 'vllm'
}
