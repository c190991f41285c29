import adapters from './adapters.ts'
import metrics from './metrics.ts'
import refused from './refused.ts'
import keptTensors from './weights-tensor-kept.ts'
import scope from './weights-transaction-scope.ts'
import transactions from './weights-transaction.ts'
import updates from './updates.ts'
import type { Routes } from '../../src/http/context.ts'

export default [adapters, metrics, refused, keptTensors, scope, transactions, updates] satisfies Routes[]
