import { lookup } from 'node:dns/promises'
import { isIP } from 'node:net'
import { networkInterfaces } from 'node:os'
import { RefitError } from '../errors.ts'
import type { StoreAddress } from './connection.ts'
import { isNumeric } from './master-policy.ts'
import type { MasterPolicy } from './master-policy.ts'
import type { Deadline } from './deadline.ts'
import { watchLimits } from './deadline.ts'

/** Returns the addresses of a name, in the order of the system's resolver. */
export type Lookup = (host: string) => Promise<string[]>

/** The allowed addresses of a name, in the form that StoreClient takes. */
export interface ResolvedMaster extends StoreAddress {
  alternatives: string[]
}

/** Linux connects to the loopback for these, and trainers that listen on all interfaces send them. */
const ANY: Readonly<Record<string, string[]>> = { '0.0.0.0': ['127.0.0.1'], '::': ['::1'] }

const systemLookup: Lookup = async host => (await lookup(host, { all: true })).map(({ address }) => address)

/**
 * The allowed addresses of a trainer's `master_address`. The name is resolved once, so a different answer a moment
 * later changes nothing. Brackets and zone of an IPv6 address are removed. Throws INVALID_REQUEST, MASTER_REFUSED,
 * STORE_UNREACHABLE or DEADLINE.
 */
export async function resolveMaster (
  master: { host: string, port: number },
  policy: MasterPolicy,
  deadline: Deadline,
  find: Lookup = systemLookup
): Promise<ResolvedMaster> {
  const { port } = master
  const host = master.host.trim().replace(/^\[(.*)\]$/, '$1').replace(/^([^%]*:[^%]*)%.*$/, '$1')
  const shown = JSON.stringify(master.host.slice(0, 200))
  const invalid = (what: string, param: string): RefitError => new RefitError('INVALID_REQUEST', what, { param })
  if (!Number.isInteger(port) || port < 1 || port > 65_535) {
    throw invalid(`master_port is ${port}; expected 1 to 65535`, 'master_port')
  }
  if (host === '' || host.length > 253 || /[\s\0/@]/.test(host)) {
    throw invalid(`master_address is ${shown}; expected a name or an address`, 'master_address')
  }
  if (isIP(host) === 0 && (isNumeric(host) || host.includes(':'))) {
    throw invalid(
      `master_address is ${shown}, which is no address in its usual form (127.0.0.1, ::1) and no name`,
      'master_address'
    )
  }
  const addresses = ANY[host] ?? (isIP(host) !== 0 ? [host] : await withDeadline(find(host), deadline, shown))
  const allowed = addresses.filter(address => policy.refusal(address, host) === undefined)
  if (allowed.length === 0) {
    const seen = addresses.length === 0
      ? 'has no address'
      : `${isIP(host) !== 0 ? 'is refused' : `is ${addresses.slice(0, 4).join(', ')}`}: ${
        policy.refusal(addresses[0]!, host)
      }`
    throw new RefitError('MASTER_REFUSED', `master_address ${shown} ${seen}`, { param: 'master_address' })
  }
  return { host: allowed[0]!, port, alternatives: allowed.slice(1) }
}

/** The addresses of this machine, for `masterPolicy`: a trainer on the same machine may name any of them. */
export function ownAddresses (): string[] {
  return Object.values(networkInterfaces()).flatMap(found => found ?? []).map(({ address }) =>
    address.replace(/%.*$/, '')
  )
}

async function withDeadline (found: Promise<string[]>, deadline: Deadline, shown: string): Promise<string[]> {
  return await new Promise<string[]>((resolve, reject) => {
    const end = watchLimits(deadline, () => {
      reject(deadline.passed(`looking up master_address ${shown}`))
    }, reject)
    void found
      .then(resolve, error => {
        reject(
          new RefitError(
            'STORE_UNREACHABLE',
            `master_address ${shown} cannot be looked up: ${(error as Error).message}`,
            { param: 'master_address', cause: error }
          )
        )
      })
      .then(end)
  })
}
