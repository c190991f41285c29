import { Type } from 'typebox'
import type { ServerContext } from '../http/context.ts'
import { allLayers, base64 } from '../http/generation/routed-experts.ts'
import type { WantedExperts } from '../http/generation/routed-experts.ts'
import type { Sample } from '../http/generation/sample.ts'
import { encodeNpy } from '../wire/trainers/npy.ts'

/** vLLM's base64 of a .npy file; prime-rl's and SkyRL's objects with base64 of the bare values. */
export type ExpertsForm = 'vllm' | 'prime-rl' | 'skyrl'

const Packed = Type.Object({
  // `data` comes first: prime-rl's client searches for `"routed_experts":{"data":"` in the bytes of a reply.
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
    'The experts that each token but the last was routed to, of prompt and output, best first, zeros in layers ' +
    'without experts; of servers with --enable-return-routed-experts.'
})

const UINT8_IDS = 256

/** Null if the sample has no experts. */
export function vllmExperts (
  { experts }: Sample,
  { wanted: { layout, from }, form }: { wanted: WantedExperts, form: ExpertsForm }
): unknown {
  if (experts === null) return null
  const shape = [experts.length / (layout.sparse.length * layout.perToken), layout.layers, layout.perToken]
  const values = (isWide: boolean): Uint8Array | Uint16Array =>
    isWide ? allLayers(experts, layout, Uint16Array) : allLayers(experts, layout, Uint8Array)
  if (form === 'vllm') return encodeNpy(values(layout.experts > UINT8_IDS), shape).toString('base64')
  // Both choose the type by the largest id that occurs; SkyRL refuses a wider type than needed.
  const isWide = experts.some(id => id >= UINT8_IDS)
  const data = base64(values(isWide))
  // Ids are below 2^15 (native/core/layout.cc), where int16 and uint16 are equal.
  if (form === 'skyrl') return { data, shape, dtype: isWide ? 'int16' : 'uint8' }
  return { data, shape, start: from, dtype: isWide ? 'uint16' : 'uint8' }
}

/** The form that /inference/v1/generate replies in: prime-rl's requests look like vLLM's, so --dialects decides. */
export function expertsForm ({ dialects }: ServerContext): ExpertsForm {
  return dialects.has('prime-rl') && !dialects.has('vllm') ? 'prime-rl' : 'vllm'
}
