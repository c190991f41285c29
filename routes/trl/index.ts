import generate from './generate.ts'
import info from './info.ts'
import trl from './trl.ts'
import { STEERING } from '../vllm/index.ts'
import type { Routes } from '../../src/http/context.ts'

export default [...STEERING, generate, info, trl] satisfies Routes[]
