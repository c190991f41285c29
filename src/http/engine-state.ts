import { Type } from 'typebox'
import type { ServingEngine } from '../contract/rollout-engine.ts'
import { nullable } from './schemas.ts'

export const EngineState = Type.Object({
  status: Type.Union([
    Type.Literal('ok'),
    Type.Literal('paused'),
    Type.Literal('torn'),
    Type.Literal('asleep'),
    Type.Literal('updating'),
    Type.Literal('unavailable')
  ]),
  weights: Type.Object({
    state: Type.Union([Type.Literal('current'), Type.Literal('torn'), Type.Literal('asleep')]),
    tags: Type.Optional(Type.Array(Type.String(), { description: 'Kinds of memory that are released.' })),
    reason: Type.Optional(Type.String()),
    tensors: Type.Optional(Type.Array(Type.String(), { description: 'Torn tensors, at most 100.' })),
    torn_count: Type.Optional(Type.Integer())
  }),
  released_memory: Type.Record(Type.String(), Type.Integer(), {
    description: 'Bytes that were released, by kind of memory.'
  }),
  weight_version: Type.String(),
  paused: nullable(Type.String(), 'The mode of the pause.'),
  transaction: nullable(
    Type.Object({
      owner: Type.String(),
      writing: Type.Boolean({ description: 'True after its first write: requests wait for its end.' }),
      seconds_left: Type.Number({ description: 'Seconds until it is aborted.' })
    }),
    'The weight transaction that is open.'
  )
}, { title: 'EngineState', description: 'State of the engine.' })

type EngineState = Type.Static<typeof EngineState>

const SHOWN = 100

/** The engine's state as the health endpoints report it. */
export function engineState (engine: ServingEngine): EngineState {
  const { weights, transactions } = engine
  const { current } = transactions
  const { paused } = engine.stats
  return {
    status: engine.closed
      ? 'unavailable'
      : weights.state !== 'current'
      ? weights.state
      : paused !== null
      ? 'paused'
      : transactions.writing
      ? 'updating'
      : 'ok',
    weights: weights.state !== 'torn'
      ? weights
      : {
        state: 'torn',
        reason: weights.reason,
        tensors: weights.tensors.slice(0, SHOWN),
        torn_count: weights.tensors.length
      },
    released_memory: engine.releasedMemory,
    weight_version: engine.weightVersion,
    paused,
    transaction: current === null
      ? null
      : { owner: current.owner, writing: current.writing, seconds_left: current.secondsLeft ?? 0 }
  }
}
