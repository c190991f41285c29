import { broadcast, join, pause, resume, weights } from '../../gateway/gateway-call.ts'
import type { Dialect } from '../dialect.ts'

export const areal: Dialect<'areal'> = {
  name: 'areal',
  title: "AReaL's vLLM mode",
  calls: {
    '/areal_pause_generation': pause,
    '/areal_continue_generation': resume,
    '/areal_update_weights': { ...weights, checkpoint: ['model_path'] },
    '/areal_update_weights_tensor': { ...weights, streamsBody: true },
    '/areal_init_weights_update_group': join(),
    // One call announces the tensors, the next one writes them.
    '/areal_set_update_weight_meta': { to: 'group', announces: { kind: 'areal', isFirst: true } },
    '/areal_update_weights_xccl': { ...broadcast, announcedBy: 'areal' },
    '/areal_set_update_weight_meta_lora': { to: 'group', announces: { kind: 'areal-lora', isFirst: true } },
    // The reply names the adapter once all of its parts have come.
    '/areal_update_weights_lora_xccl': { to: 'group', announcedBy: 'areal-lora' },
    '/areal_update_weights_lora': {
      to: 'members',
      adapter: { kind: 'load', name: 'lora_name', folder: 'lora_model_path' }
    }
  }
}
