import collectiveRpc from '../vllm/collective-rpc.ts'
import ipc from './weights-ipc.ts'
import type { Routes } from '../../src/http/context.ts'

export default [ipc, collectiveRpc] satisfies Routes[]
