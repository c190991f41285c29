import { pickleUniqueId, rawUniqueId, unpickleUniqueId } from '../wire/nccl-unique-id.ts'
import { customGroupStore, defaultGroupStore } from './group-keys.ts'
import { PrefixStore } from './prefix-store.ts'
import type { Store } from './store.ts'

/** A form in which rank 0 publishes its NCCL id. A new form is one more row of the table. */
export interface UniqueIdForm {
  /** For messages. */
  title: string
  /** The part of the store that holds the key. */
  part: (store: Store, group: string) => Store
  key: string
  decode: (value: Buffer) => Buffer
  encode: (id: Uint8Array) => Buffer
  /** Every rank joins a sum of one float32 right after the communicator is made; rank 0 hangs without it. */
  warmUp: boolean
  /**
   * Rank 0 makes the communicator with the group, as soon as all ranks are counted; if false, with its first
   * collective.
   */
  atOnce: boolean
}

export type UniqueIdFormName = 'custom' | 'default' | 'vllm' | 'nemo-rl'

const whole = (store: Store): Store => store
const raw = { decode: rawUniqueId, encode: rawUniqueId, warmUp: false, atOnce: false }

export const UNIQUE_ID_FORMS: Readonly<Record<UniqueIdFormName, UniqueIdForm>> = {
  /**
   * `init_custom_process_group`: torch's ProcessGroupNCCL, first communicator. Published with rank 0's first
   * collective.
   */
  custom: {
    title: 'a group of init_custom_process_group',
    part: (store, group) => customGroupStore(store, group, 'cuda'),
    key: '0',
    ...raw
  },
  /** `init_process_group`: the trainer's own default group. */
  default: {
    title: 'the default group of init_process_group',
    part: store => defaultGroupStore(store, 'cuda'),
    key: '0',
    ...raw
  },
  /** vLLM's StatelessProcessGroup with PyNcclCommunicator: the first object that rank 0 broadcasts. */
  vllm: {
    title: "vLLM's StatelessProcessGroup",
    part: store => new PrefixStore('broadcast_from', store),
    key: '0/0',
    decode: unpickleUniqueId,
    encode: pickleUniqueId,
    warmUp: true,
    atOnce: true
  },
  /** NeMo-RL: a key of a plain TCPStore. */
  'nemo-rl': { title: "NeMo-RL's stateless group", part: whole, key: 'nccl_unique_id', ...raw, atOnce: true }
}
