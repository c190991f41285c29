import chat from './chat.ts'
import completions from './completions.ts'
import models from './models.ts'
import type { Routes } from '../../src/http/context.ts'

export default [chat, completions, models] satisfies Routes[]
