import { PrefixStore } from './prefix-store.ts'
import type { Store } from './store.ts'

// The key prefixes of torch's process groups (distributed_c10d.py, `_new_process_group_helper`).

/** The device name in the keys: cuda for NCCL, cpu for gloo. */
export type KeyDevice = 'cuda' | 'cpu'

export const KEY_DEVICES = { nccl: 'cuda', gloo: 'cpu' } as const satisfies Record<string, KeyDevice>

/**
 * The part of the store that a group of `init_custom_process_group` uses, the helper that SGLang, slime, verl and
 * others share: the group's name twice, once by the helper and once by torch. Its key "0" is `/G/G//cuda//0` on the
 * wire.
 */
export function customGroupStore (store: Store, group: string, device: KeyDevice): Store {
  return deviceStore(new PrefixStore(group, store), group, device)
}

/** The part that the default group of `init_process_group` uses: `/default_pg/0//cuda//0`. */
export function defaultGroupStore (store: Store, device: KeyDevice): Store {
  return deviceStore(new PrefixStore('default_pg', store), '0', device)
}

function deviceStore (store: Store, group: string, device: KeyDevice): Store {
  return new PrefixStore(`${device}/`, new PrefixStore(`${group}/`, store))
}

/**
 * The keys in a group's part of the store that TORCH_DISTRIBUTED_DEBUG=DETAIL uses for the gloo group of its checks.
 */
export function detailKey (group: string, rank: number): string {
  return `pg_wrapper:${group}/0/${rank}`
}
