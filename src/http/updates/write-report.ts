import { Type } from 'typebox'
import type { WriteReport } from '../../contract/weight-source.ts'

/** Result of an update, for replies. */
export const Report = Type.Object({
  source: Type.String(),
  tensors: Type.Integer(),
  bytes: Type.Integer(),
  bytes_in_place: Type.Optional(
    Type.Integer({
      description:
        'Of broadcasts: those of the bytes that were received straight into the weights, and were not staged.'
    })
  ),
  missing: Type.Array(Type.String(), { description: 'Tensors of the model that were not brought, at most 100.' }),
  missing_count: Type.Integer(),
  ignored: Type.Array(Type.String(), { description: 'Tensors that the model has no use for.' }),
  ms: Type.Record(Type.String(), Type.Number(), { description: 'Milliseconds per phase.' }),
  gb_per_second: Type.Number({ description: '1e9 bytes per second, of the write alone.' }),
  changed: Type.Optional(Type.Integer({ description: 'Of a delta: elements that have other bits than before.' })),
  warning: Type.Optional(
    Type.String({
      description:
        'All was written, but memory of a sender stays mapped; closing it is tried again with the next update.'
    })
  ),
  transaction: Type.Optional(
    Type.String({ description: 'The weight transaction that it belongs to: label and caches wait for its end.' })
  )
}, { title: 'WriteReport' })

export function toReport ({ bytesInPlace, missingCount, gbPerSecond, ...rest }: WriteReport) {
  return {
    ...rest,
    ...bytesInPlace === undefined ? {} : { bytes_in_place: bytesInPlace },
    missing_count: missingCount,
    gb_per_second: gbPerSecond
  }
}
