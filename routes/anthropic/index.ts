import messages from './messages.ts'
import type { Routes } from '../../src/http/context.ts'

export default [messages] satisfies Routes[]
