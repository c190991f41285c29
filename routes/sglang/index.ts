import type { Routes } from '../../src/http/context.ts'
import control from './control.ts'
import generate from './generate.ts'
import health from './health.ts'
import info from './info.ts'
import loads from './loads.ts'
import lora from './lora.ts'
import memory from './memory.ts'
import parse from './parse.ts'
import pullWeights from './pull-weights.ts'
import tokenize from './tokenize.ts'
import unsupported from './unsupported.ts'
import distributed from './weights-distributed.ts'
import group from './weights-group.ts'
import remoteInstance from './weights-remote-instance.ts'
import tensor from './weights-tensor.ts'
import weights from './weights.ts'

export default [
  generate,
  health,
  info,
  loads,
  control,
  memory,
  weights,
  tensor,
  group,
  distributed,
  remoteInstance,
  lora,
  pullWeights,
  unsupported,
  tokenize,
  parse
] satisfies Routes[]
