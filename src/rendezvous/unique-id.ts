import { uniqueIdAddress } from '../wire/nccl-unique-id.ts'
import { explainMissingId, refuseDetail } from './diagnose.ts'
import type { StoreClient } from './client.ts'
import { showAddress } from './connection.ts'
import { KEY_DEVICES } from './group-keys.ts'
import { UNIQUE_ID_FORMS } from './unique-id-forms.ts'
import type { UniqueIdFormName } from './unique-id-forms.ts'
import { Deadline, isDeadline } from './deadline.ts'
import type { Limits } from './deadline.ts'

/** How often a key that still holds the id of an earlier group is read again. */
const STALE_MS = 20

export interface UniqueIdQuery {
  group: string
  /** The number of ranks of the group; for messages. */
  size: number
  /** The forms to look for; the first that appears wins. Default `custom`. */
  forms?: readonly UniqueIdFormName[]
  /** Ids of earlier groups of this name in this store. A trainer that reuses its store leaves the last one in it. */
  stale?: readonly Uint8Array[]
}

export interface FoundUniqueId {
  /** 128 bytes. */
  id: Buffer
  form: UniqueIdFormName
  /** See UniqueIdForm. */
  warmUp: boolean
  /**
   * The address at which rank 0's NCCL waits for the others (`10.0.0.7:41234`), for messages; undefined if the id has
   * none.
   */
  root: string | undefined
}

/**
 * Waits for the id of a group whose rank 0 is the trainer's. torch publishes it with the first collective. Throws
 * UNSUPPORTED as soon as the store shows that refit cannot join; the message of DEADLINE lists what the store contains.
 */
export async function findUniqueId (store: StoreClient, query: UniqueIdQuery, limits: Limits): Promise<FoundUniqueId> {
  const deadline = new Deadline(limits, store.timeoutMs)
  const forms = query.forms ?? ['custom']
  const race = new AbortController()
  const leave = (): void => {
    race.abort(deadline.signal?.reason)
  }
  deadline.signal?.addEventListener('abort', leave)
  if (deadline.signal?.aborted === true) leave()
  const runners: Array<Promise<FoundUniqueId>> = forms.map(async form =>
    await oneForm(store, form, query, deadline, race.signal)
  )
  if (forms.includes('custom')) {
    runners.push(
      refuseDetail(store, query.group, KEY_DEVICES.nccl, { timeoutMs: deadline.timeoutMs, signal: race.signal })
    )
  }
  try {
    return await Promise.race(runners)
  } catch (error) {
    if (!isDeadline(error)) throw error
    race.abort(error)
    throw deadline.passed(
      `no NCCL id of group ${JSON.stringify(query.group)} in the store at ${store.where}. ${await explainMissingId(
        store,
        {
          ...query,
          isTorch: forms.includes('custom')
        },
        deadline.signal
      )}`,
      error
    )
  } finally {
    deadline.signal?.removeEventListener('abort', leave)
    race.abort(new Error('another was first'))
    await Promise.allSettled(runners)
  }
}

async function oneForm (
  store: StoreClient,
  name: UniqueIdFormName,
  query: UniqueIdQuery,
  deadline: Deadline,
  signal: AbortSignal
): Promise<FoundUniqueId> {
  const form = UNIQUE_ID_FORMS[name]
  const part = form.part(store, query.group)
  for (;;) {
    const value = await part.get(form.key, { timeoutMs: deadline.timeoutMs, signal })
    const id = form.decode(value)
    if (query.stale?.some(old => id.equals(old)) !== true) {
      const root = uniqueIdAddress(id)
      return { id, form: name, warmUp: form.warmUp, root: root === undefined ? undefined : showAddress(root) }
    }
    await new Deadline({ timeoutMs: deadline.timeoutMs, signal }, STALE_MS).sleep(STALE_MS)
    if (deadline.timeoutMs === 0) throw deadline.passed('the store has only the id of an earlier group')
  }
}

/** Publishes the id of a group whose rank 0 is in this process. */
export async function publishUniqueId (
  store: StoreClient,
  group: string,
  form: UniqueIdFormName,
  id: Uint8Array,
  limits?: Limits
): Promise<void> {
  const { part, key, encode } = UNIQUE_ID_FORMS[form]
  await part(store, group).set(key, encode(id), limits)
}
