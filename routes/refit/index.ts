import adapters from './adapters.ts'
import metrics from './metrics.ts'
import refused from './refused.ts'
import shards from './weights-shards.ts'
import keptTensors from './weights-tensor-kept.ts'
import scope from './weights-transaction-scope.ts'
import transactions from './weights-transaction.ts'
import type { Routes } from '../../src/http/context.ts'

export default [adapters, metrics, refused, keptTensors, scope, shards, transactions] satisfies Routes[]
