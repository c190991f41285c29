import nemoRl from './nemo-rl.ts'
import sparse from './sparse.ts'
import type { Routes } from '../../src/http/context.ts'

export default [nemoRl, sparse] satisfies Routes[]
