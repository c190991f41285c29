import { RefitError } from '../../errors.ts'
import type { UpdatesContext } from '../../http/context.ts'
import { updateFromIpc } from '../checkpoint-engine/checkpoint-engine.ts'
import { vllmSleepOf } from './sleep-of.ts'
import { weightTransferOf } from './transfer.ts'

// vLLM's /collective_rpc calls any method of its workers by name. Only the methods that trainers use exist here.

export interface RpcCall {
  args: readonly unknown[]
  kwargs: Readonly<Record<string, unknown>>
  /** Seconds. */
  timeout: number | null
  /** The caller, for messages. */
  owner: string
}

interface Method {
  /** The dialects that have this method. */
  dialects: readonly string[]
  /** Returns the result of each rank. */
  run: (context: UpdatesContext, call: RpcCall) => Promise<unknown>
}

const NATIVE: readonly string[] = ['vllm', 'skyrl']
const SKYRL: readonly string[] = ['skyrl']

const METHODS: Readonly<Record<string, Method>> = {
  // vLLM's own methods; there are routes of the same names.
  init_weight_transfer_engine: {
    dialects: NATIVE,
    run: async (context, call) => {
      await weightTransferOf(context).init(take(call, 0, 'init_info'))
    }
  },
  start_weight_update: { dialects: NATIVE, run: start },
  update_weights: {
    dialects: NATIVE,
    run: async (context, call) => {
      await weightTransferOf(context).update(take(call, 0, 'update_info'))
    }
  },
  finish_weight_update: { dialects: NATIVE, run: finish },
  // SkyRL's worker extension.
  skyrl_start_weight_update: { dialects: SKYRL, run: start },
  update_weights_nccl: {
    dialects: SKYRL,
    run: async (context, call) => {
      await weightTransferOf(context).update(take(call, 0, 'update_info'), { inScope: true })
    }
  },
  update_weights_ipc: {
    dialects: SKYRL,
    run: async (context, call) => {
      await weightTransferOf(context).update(take(call, 0, 'update_info'), { inScope: true })
    }
  },
  skyrl_finish_weight_update: { dialects: SKYRL, run: finish },
  // Frozen requests keep their KV cache in place, because it cannot be moved elsewhere. The update writes all weights.
  skyrl_sleep_for_weight_sync: {
    dialects: SKYRL,
    run: async ({ engine }, call) => {
      await vllmSleepOf(engine).sleep({
        level: 2,
        mode: 'keep',
        tags: toFlag(call, 0, 'offload_kv', true) ? ['weights'] : ['weights', 'kv_cache']
      })
    }
  },
  skyrl_wake_for_weight_sync: {
    dialects: SKYRL,
    run: async ({ engine }, call) => {
      await vllmSleepOf(engine).wake(toTexts(call, 0, 'tags'))
    }
  },
  // checkpoint-engine's worker extension.
  update_weights_from_ipc: {
    dialects: ['checkpoint-engine'],
    run: async (context, call) => {
      await updateFromIpc(context, toHandles(call), call.timeout === null ? {} : { timeout: call.timeout })
    }
  }
}

/** Runs a method. Throws INVALID_REQUEST for an unknown method, with the known ones, and for invalid arguments. */
export async function callMethod (context: UpdatesContext, name: string, call: RpcCall): Promise<unknown[]> {
  const isServed = ({ dialects }: Method): boolean => dialects.some(dialect => context.dialects.has(dialect))
  const method = Object.hasOwn(METHODS, name) ? METHODS[name]! : undefined
  if (method === undefined || !isServed(method)) {
    const names = Object.keys(METHODS).filter(known => isServed(METHODS[known]!))
    throw new RefitError(
      'INVALID_REQUEST',
      `method: ${JSON.stringify(name.slice(0, 100))} is not a method of this server; ` +
        `expected one of ${names.join(', ')}`,
      { param: 'method' }
    )
  }
  const result = await method.run(context, call) ?? null
  return Array.from({ length: context.engine.info.ranks }, () => result)
}

async function start (context: UpdatesContext, call: RpcCall): Promise<void> {
  await weightTransferOf(context).start({
    owner: call.owner,
    checkpointFormat: toFlag(call, 0, 'is_checkpoint_format', true)
  })
}

async function finish (context: UpdatesContext, call: RpcCall): Promise<void> {
  const version = take(call, 0, 'weight_version') ?? undefined
  if (version !== undefined && typeof version !== 'string') throw wrong('weight_version', 'a str', version)
  await weightTransferOf(context).finish(version)
}

/** An argument by position or by name, as in Python. */
function take ({ args, kwargs }: RpcCall, index: number, name: string): unknown {
  return Object.hasOwn(kwargs, name) ? kwargs[name] : args[index]
}

function toFlag (call: RpcCall, index: number, name: string, other: boolean): boolean {
  const value = take(call, index, name) ?? other
  if (typeof value !== 'boolean') throw wrong(name, 'a bool', value)
  return value
}

function toTexts (call: RpcCall, index: number, name: string): string[] {
  const value = take(call, index, name) ?? []
  if (!Array.isArray(value) || !value.every(item => typeof item === 'string')) throw wrong(name, 'a list of str', value)
  return value
}

function toHandles (call: RpcCall): Record<string, string> {
  const value = take(call, 0, 'zmq_handles')
  if (
    typeof value !== 'object' || value === null || Array.isArray(value) ||
    !Object.values(value).every(item => typeof item === 'string')
  ) throw wrong('zmq_handles', 'a dict of str', value)
  return value as Record<string, string>
}

function wrong (name: string, expected: string, value: unknown): RefitError {
  return new RefitError(
    'INVALID_REQUEST',
    `${name}: expected ${expected}, got ${String(JSON.stringify(value)).slice(0, 100)}`,
    { param: name }
  )
}
