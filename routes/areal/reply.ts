import { Type } from 'typebox'
import { rankMessage } from '../../src/dialects/areal/areal.ts'
import { refusals, WeightsRefusal } from '../../src/http/schemas.ts'

// The parts that all routes of AReaL have in common.

export const Done = Type.Object({ success: Type.Literal(true), message: Type.String() }, {
  title: 'ArealReply',
  description: 'Done.'
})

export const schema = { tags: ['weights'], response: { 200: Done, ...refusals(WeightsRefusal) } }

/** Some of AReaL's calls send `{}`. */
export const Empty = Type.Any({ description: 'AReaL sends {}.' })

/** The reply of AReaL's own server: one line for each rank. */
export function done (ranks: number): Type.Static<typeof Done> {
  return { success: true, message: rankMessage(ranks) }
}
