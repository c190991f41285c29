import { RefitError } from '../errors.ts'
import type { StoreClient } from './client.ts'
import { customGroupStore, detailKey } from './group-keys.ts'
import type { KeyDevice } from './group-keys.ts'
import type { Store } from './store.ts'
import { Deadline } from './deadline.ts'
import type { Limits } from './deadline.ts'

// Some settings of a trainer keep ranks of other programs out of its group. The keys in the store show which setting it
// is.

/** How long the store is searched for the reason after a deadline. */
const SEARCH_MS = 3000
/** How many missing ranks a message names. */
const MOST_SHOWN = 20

const DETAIL = 'The trainer runs with TORCH_DISTRIBUTED_DEBUG=DETAIL. ' +
  'torch then compares every collective over a group of its own, which refit is not in: ' +
  'set it to OFF or INFO'
const SPLIT =
  'torch publishes it when rank 0 begins its first broadcast on the group. If the trainer hangs in that broadcast: ' +
  'its default process group is bound to a device (init_process_group(device_id=...)), so the group is split from it ' +
  'and has no id of its own (create the default group without device_id); ' +
  'or TORCH_NCCL_BCAST_UNIQUEID=0 is set, or another group_name'
/** Keys on the wire that show a setting. */
const SIGNS: ReadonlyArray<readonly [RegExp, string]> = [
  [/\/pg_wrapper:/, DETAIL],
  [
    /nccl_storekey_/,
    'The trainer uses torch\'s backend nccl2 (TORCH_DIST_USE_NCCL2, "nccl2" or "nccl-lazy"), ' +
    'which exchanges its ids in another way: use backend "nccl"'
  ],
  [
    /UniqueNCCLID:/,
    'The group has more ranks than TORCH_NCCL_RANKS_PER_ROOT (128 unless set). torch then makes it with several ids, ' +
    'which refit does not support: set it to at least the number of ranks'
  ],
  [
    /IntraNodeComm\//,
    'The trainer runs with ENABLE_INTRA_NODE_COMM=1, whose rendezvous refit does not take part in: unset it'
  ]
]
const GROUP_KEY = /^\/([^/]+)\/\1\/\/(cuda|cpu)\/\//

/**
 * Rejects with UNSUPPORTED once the store shows that rank 0 runs with TORCH_DISTRIBUTED_DEBUG=DETAIL, else with the
 * error of the wait.
 */
export async function refuseDetail (
  store: StoreClient,
  group: string,
  device: KeyDevice,
  limits: Limits
): Promise<never> {
  await customGroupStore(store, group, device).wait([detailKey(group, 0)], limits)
  throw new RefitError('UNSUPPORTED', DETAIL)
}

/** The reason that the store shows for a missing NCCL id. `isTorch`: the group is torch's. Never rejects. */
export async function explainMissingId (
  store: StoreClient,
  query: { group: string, size: number, isTorch: boolean },
  signal?: AbortSignal
): Promise<string> {
  const found = await look(store, query, 'cuda', signal)
  return found.length > 0
    ? found.join('. ')
    : `All ranks have been counted. ${
      query.isTorch
        ? SPLIT
        : 'Rank 0 publishes it when it makes its communicator: it has not come to that, or its group is of another kind'
    }`
}

/** The reason that some of gloo's addresses are missing. Never rejects. */
export async function explainMissingRanks (
  store: StoreClient,
  query: { group: string, size: number },
  signal?: AbortSignal
): Promise<string> {
  const missing: number[] = []
  await findMissing(
    customGroupStore(store, query.group, 'cpu'),
    [0, query.size],
    missing,
    new Deadline({ signal }, SEARCH_MS)
  )
    .catch(() => {})
  const found = await look(store, query, 'cpu', signal)
  const shown = missing.slice(0, MOST_SHOWN).join(', ') + (missing.length > MOST_SHOWN ? ' and more' : '')
  return [
    missing.length > 0
      ? `Rank${missing.length > 1 ? 's' : ''} ${shown} of ${query.size} ${missing.length > 1 ? 'are' : 'is'} missing`
      : '',
    ...found
  ]
    .filter(text => text !== '')
    .join('. ')
}

/**
 * Finds the first ranks in [first, end) without an address, one more than a message shows. It bisects, because there
 * may be tens of thousands of ranks.
 */
async function findMissing (
  part: Store,
  [first, end]: readonly [number, number],
  missing: number[],
  limits: Limits
): Promise<void> {
  if (
    missing.length > MOST_SHOWN ||
    await part.check(Array.from({ length: end - first }, (_, i) => `0/${first + i}`), limits)
  ) return
  if (end - first === 1) {
    missing.push(first)
    return
  }
  const middle = Math.ceil((first + end) / 2)
  await findMissing(part, [first, middle], missing, limits)
  await findMissing(part, [middle, end], missing, limits)
}

/** The reasons that the store shows, as sentences without full stops. */
async function look (
  store: StoreClient,
  { group, size }: { group: string, size: number },
  device: KeyDevice,
  signal: AbortSignal | undefined
): Promise<string[]> {
  const limits: Limits = { timeoutMs: SEARCH_MS, signal }
  const count = await store.countWorkers(0, limits).catch(() => undefined)
  if (count === undefined) return ['The store does not answer any more']
  const keys = await store.listKeys(limits).catch(() => undefined) ?? await guess(store, group, device, limits)
  const reasons = SIGNS.filter(([sign]) => keys.some(key => sign.test(key))).map(([, text]) => text)
  if (count < size) reasons.push(`Only ${count} of ${size} ranks have come to the store`)
  const others = new Set(keys.map(key => GROUP_KEY.exec(key)?.[1]).filter(name => name !== undefined && name !== group))
  if (others.size > 0) {
    reasons.push(`The store has keys of ${
      [...others]
        .slice(0, 5)
        .map(name => JSON.stringify(name))
        .join(', ')
    }: is group_name the trainer's?`)
  }
  return reasons
}

/** For a server that cannot list its keys: the keys of SIGNS whose full names are known, if they exist. */
async function guess (store: StoreClient, group: string, device: KeyDevice, limits: Limits): Promise<string[]> {
  const names = [detailKey(group, 0), 'UniqueNCCLID:0']
  const part = customGroupStore(store, group, device)
  const there = await Promise.all(names.map(async name => await part.check([name], limits).catch(() => false)))
  return names.filter((_, i) => there[i]).map(name => `/${name}`)
}
