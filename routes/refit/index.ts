import adapters from './adapters.ts'
import metrics from './metrics.ts'
import refused from './refused.ts'
import report from './report.ts'
import samples from './samples.ts'
import truth from './truth.ts'
import shards from './weights-shards.ts'
import keptTensors from './weights-tensor-kept.ts'
import scope from './weights-transaction-scope.ts'
import transactions from './weights-transaction.ts'
import updates from './updates.ts'
import type { Routes } from '../../src/http/context.ts'

export default [
  adapters,
  metrics,
  refused,
  report,
  keptTensors,
  samples,
  scope,
  shards,
  transactions,
  truth,
  updates
] satisfies Routes[]
