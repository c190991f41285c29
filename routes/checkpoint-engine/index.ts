import collectiveRpc from '../vllm/collective-rpc.ts'
import loraIpc from './lora-ipc.ts'
import ipc from './weights-ipc.ts'
import type { Routes } from '../../src/http/context.ts'

export default [ipc, loraIpc, collectiveRpc] satisfies Routes[]
