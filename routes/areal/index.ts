import sleep from '../vllm/sleep.ts'
import areal from './areal.ts'
import type { Routes } from '../../src/http/context.ts'

export default [sleep, areal] satisfies Routes[]
