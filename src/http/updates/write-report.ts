import { Type } from 'typebox'
import type { WriteReport } from '../../contract/weight-source.ts'

/** Result of an update, for replies. */
export const Report = Type.Object({
  source: Type.String(),
  tensors: Type.Integer(),
  bytes: Type.Integer(),
  bytes_in_place: Type.Optional(
    Type.Integer({
      description: 'For broadcasts: bytes that were received straight into the weights, without staging.'
    })
  ),
  missing: Type.Array(Type.String(), {
    description: 'Tensors of the model that the update did not contain, at most 100.'
  }),
  missing_count: Type.Integer(),
  ignored: Type.Array(Type.String(), { description: 'Tensors that the model does not use.' }),
  ms: Type.Record(Type.String(), Type.Number(), { description: 'Milliseconds per phase.' }),
  gb_per_second: Type.Number({ description: 'Speed of the write alone, in 1e9 bytes per second.' }),
  changed: Type.Optional(Type.Integer({ description: 'For a delta: number of elements whose bits have changed.' })),
  warning: Type.Optional(
    Type.String({
      description:
        "All bytes were written, but a mapping of a sender's memory stays open; the next update tries to close it."
    })
  ),
  transaction: Type.Optional(
    Type.String({ description: 'The weight transaction of the update. The label and the caches change when it ends.' })
  )
}, { title: 'WriteReport' })

export function toReport ({ bytesInPlace, missingCount, gbPerSecond, startedAt: _, ...rest }: WriteReport) {
  return {
    ...rest,
    ...bytesInPlace === undefined ? {} : { bytes_in_place: bytesInPlace },
    missing_count: missingCount,
    gb_per_second: gbPerSecond
  }
}
