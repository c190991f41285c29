import { RefitError } from '../errors.ts'

/** A process group of a trainer, as it asks for it. Rank 0 is the trainer's: it has the store and sends. */
export interface GroupSpec {
  name: string
  backend: 'nccl' | 'gloo'
  /** Where rank 0's store listens. */
  address: string
  port: number
  /** The rank of our first rank; the others follow. */
  rankOffset: number
  /** Ranks in all. */
  worldSize: number
  /** All ranks meet in a barrier as soon as the group stands. */
  barrier: boolean
}

export type GroupFields = Omit<GroupSpec, 'backend'> & { backend: string }

const LONGEST_NAME = 200

/** Throws for what cannot be, before anything is opened: INVALID_REQUEST, UNSUPPORTED. `ranks`, `device`: the engine's. */
export function checkSpec (fields: GroupFields, { ranks, device }: { ranks: number, device: 'cpu' | 'cuda' }): GroupSpec {
  const { name, rankOffset, worldSize } = fields
  // Keys of the store are made of it.
  if (name.length > LONGEST_NAME || !/^[\x21-\x7e]+$/.test(name)) throw invalid('group_name', `expected 1 to ${LONGEST_NAME} printable ASCII characters without spaces, got ${JSON.stringify(name.slice(0, LONGEST_NAME))}`)
  const backend = toBackend(fields.backend, device)
  if (rankOffset < 1) throw invalid('rank_offset', 'rank 0 is the trainer\'s, which has the store and sends; expected 1 or more, got ' + rankOffset)
  if (rankOffset + ranks > worldSize) {
    const own = ranks === 1 ? `rank ${rankOffset}` : `ranks ${rankOffset} to ${rankOffset + ranks - 1}`
    throw invalid('world_size', `this engine has ${ranks} tensor-parallel rank${ranks === 1 ? '' : 's'}, with rank_offset ${rankOffset} that is ${own}, but world_size is ${worldSize}`)
  }
  return { ...fields, backend, address: bare(fields.address) }
}

export function isSameSpec (one: GroupSpec, other: GroupSpec): boolean {
  return JSON.stringify(ordered(one)) === JSON.stringify(ordered(other))
}

export function ordered ({ name, backend, address, port, rankOffset, worldSize, barrier }: GroupSpec): unknown[] {
  return [name, backend, address, port, rankOffset, worldSize, barrier]
}

function toBackend (text: string, device: 'cpu' | 'cuda'): GroupSpec['backend'] {
  const backend = text.toLowerCase()
  if (backend !== 'nccl' && backend !== 'gloo') throw new RefitError('UNSUPPORTED', `backend: expected "nccl" or "gloo", got ${JSON.stringify(text.slice(0, 100))}`, { param: 'backend' })
  if (backend === 'nccl' && device === 'cpu') {
    throw new RefitError('GROUP_REFUSED', 'backend: NCCL joins cards, and this engine computes on the CPU; make the group with "gloo" on both sides, or serve with --device cuda', { param: 'backend' })
  }
  return backend
}

/** IPv6 addresses come in brackets or without. */
function bare (address: string): string {
  return /^\[.*\]$/.test(address) ? address.slice(1, -1) : address
}

function invalid (param: string, message: string): RefitError {
  return new RefitError('INVALID_REQUEST', `${param}: ${message}`, { param })
}
