import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { UpdatesContext } from '../../http/context.ts'
import { nullable } from '../../http/schemas.ts'
import { weightTransferOf } from '../vllm/transfer.ts'

export const FetchWeights = Type.Object({
  target_version: Type.Integer({
    minimum: 0,
    description: '0: a copy of base_model_path of /init_weight_transfer_engine.'
  }),
  sync_dir: nullable(
    Type.String({ minLength: 1 }),
    'Where the trainer publishes delta-00000001 and so on, inside the allowed roots.'
  ),
  uri: nullable(Type.String({ minLength: 1 }), 'The folder of target_version, if it is not that of sync_dir.')
}, { title: 'SkyrlFetchRequest' })
export type FetchWeights = Static<typeof FetchWeights>

interface FetchedByRank {
  status: 'ok'
  target_version: number
  tensors: number
  bytes: number
  stats: { fetch_s: number, apply_s: number, reset_s: number, total_s: number }
}

/** Updates the host's checkpoint to a version; returns one reply for each rank. */
export async function fetchWeights (
  context: UpdatesContext,
  { target_version: targetVersion, sync_dir: syncDir, uri }: FetchWeights
): Promise<FetchedByRank[]> {
  const from = performance.now()
  const { version, tensors, bytes, seconds } = await weightTransferOf(context).fetch({
    targetVersion,
    syncDir: syncDir ?? null,
    uri: uri ?? null
  })
  const stats = {
    fetch_s: 0,
    apply_s: seconds.apply,
    reset_s: seconds.reset,
    total_s: (performance.now() - from) / 1000
  }
  return Array.from(
    { length: context.engine.info.ranks },
    () => ({ status: 'ok', target_version: version, tensors, bytes, stats })
  )
}
