import vllmLora from '../vllm/lora.ts'
import sleep from '../vllm/sleep.ts'
import control from './control.ts'
import lora from './lora.ts'
import weights from './weights.ts'
import distributed from './weights-distributed.ts'
import type { Routes } from '../../src/http/context.ts'

export default [sleep, distributed, lora, vllmLora, weights, control] satisfies Routes[]
