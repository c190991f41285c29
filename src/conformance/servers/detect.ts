import { RefitError } from '../../errors.ts'
import type { HttpTarget } from '../http-target.ts'
import { NoReply } from '../http-target.ts'
import type { Server } from './server.ts'
import { SglangServer } from './sglang.ts'
import { VllmServer } from './vllm.ts'

export type ServerKind = Server['kind']

/**
 * The server at the target's address. Without `kind`, SGLang's routes win, because refit has both. Throws
 * ENGINE_FAILED if nothing there answers.
 */
export async function findServer (target: HttpTarget, kind: ServerKind | null): Promise<Server> {
  try {
    if (kind === 'vllm') return await require(target, '/get_world_size', new VllmServer(target))
    const { ok } = await target.get('/model_info')
    if (ok) return new SglangServer(target)
    if (kind === 'sglang') return await require(target, '/model_info', new SglangServer(target))
    return await require(target, '/get_world_size', new VllmServer(target))
  } catch (error) {
    if (!(error instanceof NoReply)) throw error
    throw new RefitError('ENGINE_FAILED', `${target.url} cannot be reached: ${error.message}`, { cause: error })
  }
}

async function require (target: HttpTarget, route: string, server: Server): Promise<Server> {
  const reply = await target.get(route)
  if (reply.ok) return server
  throw new RefitError(
    'ENGINE_FAILED',
    `${target.url} has no routes of ${server.kind === 'vllm' ? 'vLLM (VLLM_SERVER_DEV_MODE=1)' : 'SGLang'}: ` +
      `GET ${route} answered ${reply.text}`
  )
}
