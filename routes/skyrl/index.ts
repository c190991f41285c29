import generate from './generate.ts'
import lora from './lora.ts'
import skyrl from './skyrl.ts'
import { STEERING, TRANSFER } from '../vllm/index.ts'
import type { Routes } from '../../src/http/context.ts'

export default [...STEERING, ...TRANSFER, generate, skyrl, lora] satisfies Routes[]
