import cache from '../vllm/cache.ts'
import control from '../vllm/control.ts'
import generate from '../vllm/generate.ts'
import info from '../vllm/info.ts'
import lora from '../vllm/lora.ts'
import weightChecker from '../vllm/weight-checker.ts'
import updateWeights from '../vllm/update-weights.ts'
import chatTokens from './chat-tokens.ts'
import primeRl from './prime-rl.ts'
import type { Routes } from '../../src/http/context.ts'

export default [
  control,
  cache,
  info,
  weightChecker,
  generate,
  primeRl,
  chatTokens,
  updateWeights,
  lora
] satisfies Routes[]
