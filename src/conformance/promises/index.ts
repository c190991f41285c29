import type { ConformancePromise } from '../promise.ts'
import * as answers from './answers.ts'
import * as concurrency from './concurrency.ts'
import * as files from './files.ts'
import * as groups from './groups.ts'
import * as identity from './identity.ts'
import * as labels from './labels.ts'
import * as load from './load.ts'
import * as memory from './memory.ts'
import * as pauses from './pauses.ts'
import * as payloads from './payloads.ts'
import * as refusals from './refusals.ts'
import * as senders from './senders.ts'
import * as stalls from './stalls.ts'

/** All promises, in the order of the table: those that may leave a weak server unusable come last. */
export const PROMISES: readonly ConformancePromise[] = [
  identity,
  labels,
  answers,
  pauses,
  load,
  concurrency,
  refusals,
  files,
  payloads,
  groups,
  senders,
  stalls,
  memory
]
  .flatMap(group => Object.values(group).filter(isPromise))

function isPromise (value: unknown): value is ConformancePromise {
  return typeof value === 'object' && value !== null && 'check' in value
}
