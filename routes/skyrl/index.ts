import generate from './generate.ts'
import skyrl from './skyrl.ts'
import { STEERING, TRANSFER } from '../vllm/index.ts'
import type { Routes } from '../../src/http/context.ts'

export default [...STEERING, ...TRANSFER, generate, skyrl] satisfies Routes[]
