import { loadsAdapter, weights } from '../../gateway/gateway-call.ts'
import type { Dialect } from '../dialect.ts'

export const checkpointEngine: Dialect<'checkpoint-engine'> = {
  name: 'checkpoint-engine',
  title: 'checkpoint-engine',
  calls: { '/update_weights_from_ipc': weights, '/load_lora_adapter_from_ipc': loadsAdapter }
}
