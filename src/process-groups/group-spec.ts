import { RefitError } from '../errors.ts'
import type { UniqueIdFormName } from '../rendezvous/unique-id-forms.ts'

/** A process group, as a trainer requests it. */
export interface GroupSpec {
  name: string
  backend: 'nccl' | 'gloo'
  /**
   * How rank 0 publishes the id of NCCL's communicator, and when the communicator is made. gloo has torch's form only.
   */
  form: UniqueIdFormName
  /** The address at which rank 0's store listens. */
  address: string
  port: number
  /** The rank of our first rank; the others follow. */
  rankOffset: number
  /** The number of ranks of the whole group. */
  worldSize: number
  /** The rank that sends. */
  root: number
  /** True if rank 0 is ours: it then runs the store at `address`, an address of this machine, and makes the id. */
  hosts: boolean
  /** All ranks meet in a barrier as soon as the group is connected. */
  barrier: boolean
}

/** Defaults: form "custom", root 0, hosts false, barrier false. */
export type GroupFields =
  & Omit<GroupSpec, 'backend' | 'form' | 'root' | 'hosts' | 'barrier'>
  & Partial<Pick<GroupSpec, 'form' | 'root' | 'hosts' | 'barrier'>>
  & { backend: string }

const LONGEST_NAME = 200

/**
 * Throws INVALID_REQUEST, UNSUPPORTED or GROUP_REFUSED for an impossible group, before anything is opened. `ranks`,
 * `device`: the engine's.
 */
export function checkSpec (
  fields: GroupFields,
  { ranks, device }: { ranks: number, device: 'cpu' | 'cuda' }
): GroupSpec {
  const { name, rankOffset, worldSize, form = 'custom', root = 0, hosts = false, barrier = false } = fields
  // The name becomes a part of the store's keys.
  if (name.length > LONGEST_NAME || !/^[\x21-\x7e]+$/.test(name)) {
    throw invalid(
      'group_name',
      `expected 1 to ${LONGEST_NAME} printable ASCII characters without spaces, got ${
        JSON.stringify(name.slice(0, LONGEST_NAME))
      }`
    )
  }
  const backend = toBackend(fields.backend, device)
  if (!hosts && rankOffset < 1) {
    throw invalid(
      'rank_offset',
      `rank 0 is the trainer's, which has the store${
        root === 0 ? ' and sends' : ''
      }; expected 1 or more, got ${rankOffset}`
    )
  }
  if (hosts && rankOffset !== 0) {
    throw invalid('rank_offset', `this engine has rank 0 and the store; expected 0, got ${rankOffset}`)
  }
  if (rankOffset + ranks > worldSize) {
    const own = ranks === 1 ? `rank ${rankOffset}` : `ranks ${rankOffset} to ${rankOffset + ranks - 1}`
    throw invalid(
      'world_size',
      `this engine has ${ranks} tensor-parallel rank${
        ranks === 1 ? '' : 's'
      }, with rank_offset ${rankOffset} that is ${own}, but world_size is ${worldSize}`
    )
  }
  if (root >= worldSize || (root >= rankOffset && root < rankOffset + ranks)) {
    throw invalid(
      'world_size',
      `rank ${root} sends, which is ${
        root >= worldSize ? 'none' : "one of this engine's own"
      } of the ${worldSize} ranks`
    )
  }
  return {
    name,
    backend,
    form,
    address: bare(fields.address),
    port: fields.port,
    rankOffset,
    worldSize,
    root,
    hosts,
    barrier
  }
}

export function isSameSpec (one: GroupSpec, other: GroupSpec): boolean {
  return JSON.stringify(ordered(one)) === JSON.stringify(ordered(other))
}

function ordered (
  { name, backend, form, address, port, rankOffset, worldSize, root, hosts, barrier }: GroupSpec
): unknown[] {
  return [name, backend, form, address, port, rankOffset, worldSize, root, hosts, barrier]
}

function toBackend (text: string, device: 'cpu' | 'cuda'): GroupSpec['backend'] {
  const backend = text.toLowerCase()
  if (backend !== 'nccl' && backend !== 'gloo') {
    throw new RefitError(
      'UNSUPPORTED',
      `backend: expected "nccl" or "gloo", got ${JSON.stringify(text.slice(0, 100))}`,
      { param: 'backend' }
    )
  }
  if (backend === 'nccl' && device === 'cpu') {
    throw new RefitError(
      'GROUP_REFUSED',
      'backend: NCCL needs GPUs, and this engine computes on the CPU; ' +
        'make the group with "gloo" on both sides, or serve with --device cuda',
      { param: 'backend' }
    )
  }
  return backend
}

/** Trainers send IPv6 addresses with or without brackets. */
function bare (address: string): string {
  return /^\[.*\]$/.test(address) ? address.slice(1, -1) : address
}

function invalid (param: string, message: string): RefitError {
  return new RefitError('INVALID_REQUEST', `${param}: ${message}`, { param })
}
