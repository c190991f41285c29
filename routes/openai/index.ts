import chat from './chat.ts'
import completions from './completions.ts'
import models from './models.ts'
import responses from './responses.ts'
import type { Routes } from '../../src/http/context.ts'

export default [chat, completions, responses, models] satisfies Routes[]
