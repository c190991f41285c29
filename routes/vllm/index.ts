import cache from './cache.ts'
import chatRender from './chat-render.ts'
import collectiveRpc from './collective-rpc.ts'
import control from './control.ts'
import generate from './generate.ts'
import info from './info.ts'
import lora from './lora.ts'
import releaseKv from './release-kv.ts'
import sleep from './sleep.ts'
import updateWeights from './update-weights.ts'
import weightChecker from './weight-checker.ts'
import weights from './weights.ts'
import type { Routes } from '../../src/http/context.ts'

/** Routes with which vLLM's own clients control the server and generate. */
export const STEERING: readonly Routes[] = [
  control,
  cache,
  sleep,
  releaseKv,
  info,
  weightChecker,
  generate,
  chatRender,
  lora
]

/** vLLM's weight transfer. */
export const TRANSFER: readonly Routes[] = [weights, updateWeights, collectiveRpc]

export default [...STEERING, ...TRANSFER] satisfies Routes[]
