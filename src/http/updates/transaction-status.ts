import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { TransactionStatus, WeightCoverage } from '../../contract/weight-transactions.ts'
import { nullable } from '../schemas.ts'

const Names = (description: string) => Type.Array(Type.String(), { description: `${description}; at most 100.` })

/** State of a weight transaction, or how it ended. */
export const Transaction = Type.Object({
  id: Type.String(),
  owner: Type.String(),
  kind: Type.Union([Type.Literal('transaction'), Type.Literal('scope')], {
    description: "scope: a trainer's begin_weight_update."
  }),
  state: Type.Union([Type.Literal('open'), Type.Literal('committed'), Type.Literal('aborted')]),
  writing: Type.Boolean({ description: 'True after the first write: nothing is generated until it ends.' }),
  weight_version: Type.Union([Type.String(), Type.Null()], {
    description: 'The label that its commit sets; null if the label does not change.'
  }),
  expected_count: Type.Union([Type.Integer(), Type.Null()], {
    description: 'Number of tensors that a commit requires; null if it requires none.'
  }),
  written_count: Type.Integer({ description: 'Number of tensors of the model that were written whole.' }),
  missing: Names('Expected tensors (all tensors, if none are expected) that have not been written'),
  missing_count: Type.Integer(),
  failed: Names('Tensors of failed writes that were not repeated; a commit requires them'),
  failed_count: Type.Integer(),
  torn: Names('Tensors of the model that are torn now, or were when it ended'),
  torn_count: Type.Integer(),
  writes: Type.Integer({ description: 'Number of writes that succeeded.' }),
  bytes: Type.Integer({ description: 'Bytes that these writes read from their sources.' }),
  seconds: Type.Number({ description: 'Time that it has been open, or was open.' }),
  seconds_left: Type.Union([Type.Number(), Type.Null()], {
    description: 'Time until it is aborted; null after it has ended.'
  }),
  outcome: Type.Union([Type.Literal('old'), Type.Literal('new'), Type.Literal('torn'), Type.Null()], {
    description: 'After its end, the state of the weights: old (as before), new (as written) or torn.'
  }),
  reason: Type.Union([Type.String(), Type.Null()], { description: 'The reason of an abort.' }),
  ms: Type.Union([Type.Object({ copy: Type.Number(), swap: Type.Number() }), Type.Null()], {
    description: 'After a commit that has swapped the sets of weights: milliseconds to copy the tensors that it had ' +
      'not received, and until steps used the other set.'
  })
}, { title: 'WeightTransaction', description: 'State of a weight transaction, or how it ended.' })

export function toTransaction (
  { scope, version, expected, written, missingCount, failedCount, tornCount, secondsLeft, seconds, swapped, ...rest }:
    TransactionStatus
): Static<typeof Transaction> {
  return {
    ...rest,
    kind: scope ? 'scope' : 'transaction',
    weight_version: version,
    expected_count: expected,
    written_count: written,
    missing_count: missingCount,
    failed_count: failedCount,
    torn_count: tornCount,
    seconds: rounded(seconds),
    seconds_left: secondsLeft === null ? null : rounded(secondsLeft),
    ms: swapped === null ? null : { copy: swapped.copy, swap: swapped.swap }
  }
}

/** In seconds, at most a week: a transaction that is forgotten must not stop generation forever. */
export const Deadline = Type.Number({ exclusiveMinimum: 0, maximum: 604_800 })

/** Tensors that updates wrote since a pause. */
export const Coverage = nullable(
  Type.Object({
    since: Type.Union([Type.Literal('pause'), Type.Literal('transaction')]),
    missing: Names('Tensors of the model that no update has written since then'),
    missing_count: Type.Integer()
  }),
  'Tensors that no update has written since the last pause or, without a pause, since a weight transaction was ' +
    'opened. Absent or null if there was no update.'
)

export function toCoverage (coverage: WeightCoverage | null): Static<typeof Coverage> {
  return coverage === null
    ? null
    : { since: coverage.since, missing: coverage.missing, missing_count: coverage.missingCount }
}

function rounded (seconds: number): number {
  return Math.round(seconds * 1000) / 1000
}
