import { BlockList, isIP, isIPv4, isIPv6 } from 'node:net'
import { RefitError } from '../errors.ts'

/**
 * The stores that refit may connect to. A caller who may name a `master_address` can make this machine open
 * connections.
 */
export interface MasterPolicy {
  /** The reason to refuse `address` (canonical, resolved from the requested `host`); undefined if it is allowed. */
  refusal: (address: string, host: string) => string | undefined
}

type Range = readonly [network: string, prefix: number]

/**
 * Always refused, whatever the patterns allow: link-local addresses, because clouds serve credentials there, and
 * addresses that belong to no machine.
 */
const NEVER: readonly Range[] = [
  ['169.254.0.0', 16],
  ['fe80::', 10],
  // Credential services outside of link-local: AWS (IPv6), GCP (IPv6), Azure, Alibaba, Oracle.
  ['fd00:ec2::', 32],
  ['fd20:ce::254', 128],
  ['168.63.129.16', 32],
  ['100.100.100.200', 32],
  ['192.0.0.192', 32],
  ['0.0.0.0', 8],
  ['224.0.0.0', 4],
  ['255.255.255.255', 32],
  ['::', 128],
  ['ff00::', 8]
]
/** Loopback and private addresses (RFC 1918, RFC 4193). */
const ALLOWED: readonly Range[] = [
  ['127.0.0.0', 8],
  ['::1', 128],
  ['10.0.0.0', 8],
  ['172.16.0.0', 12],
  ['192.168.0.0', 16],
  ['fc00::', 7]
]
const NAME = /^(?:\*\.)?(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.?$/i

/**
 * `patterns`: the values of --allow-master, each an address, a network (`100.64.0.0/10`), a name, `*.cluster.example`
 * or `*`. `own`: the addresses of this machine. Throws CONFIG for any other pattern.
 */
export function masterPolicy (patterns: readonly string[] = [], own: readonly string[] = []): MasterPolicy {
  const never = listOf(NEVER)
  const allowed = listOf(ALLOWED)
  const names: string[] = []
  for (const pattern of patterns) addPattern(pattern, allowed, names)
  for (const address of own) allowed.addAddress(address, family(address))
  return {
    refusal (given, host) {
      const address = given.replace(/%.*$/, '')
      const all = [address, ...embedded(address)]
      if (all.some(one => never.check(one, family(one)))) {
        return 'link-local, metadata, multicast and unspecified addresses are never connected to'
      }
      // An IPv6 address that embeds an IPv4 address reaches the IPv4 address.
      const inner = all.at(-1)!
      if (allowed.check(inner, family(inner)) || names.some(name => matches(host, name))) return undefined
      return 'it is neither loopback nor private: allow it with --allow-master'
    }
  }
}

/** The IPv4 address in an IPv6 address: mapped, compatible, NAT64 or 6to4. */
function embedded (address: string): string[] {
  if (!isIPv6(address)) return []
  const groups = expand(address)
  const dotted = (high: number, low: number): string => [high >> 8, high & 255, low >> 8, low & 255].join('.')
  if (groups[0] === 0x2002) return [dotted(groups[1]!, groups[2]!)]
  const start = groups.slice(0, 6).join()
  // ::1 and :: embed no IPv4 address.
  if (start === '0,0,0,0,0,0') return groups[6] === 0 && groups[7]! <= 1 ? [] : [dotted(groups[6]!, groups[7]!)]
  return start === '0,0,0,0,0,65535' || start === '0,0,0,0,65535,0' || start === '100,65435,0,0,0,0'
    ? [dotted(groups[6]!, groups[7]!)]
    : []
}

/** The eight groups of an IPv6 address. */
function expand (address: string): number[] {
  const text = address.replace(
    /(\d+)\.(\d+)\.(\d+)\.(\d+)$/,
    (_, a, b, c, d) => `${(a * 256 + +b).toString(16)}:${(c * 256 + +d).toString(16)}`
  )
  const [left = '', right] = text.split('::')
  const numbers = (part: string): number[] => part === '' ? [] : part.split(':').map(group => parseInt(group, 16))
  const [head, tail] = [numbers(left), numbers(right ?? '')]
  return right === undefined ? head : [...head, ...new Array<number>(8 - head.length - tail.length).fill(0), ...tail]
}

function addPattern (pattern: string, allowed: BlockList, names: string[]): void {
  const bare = pattern.trim().replace(/^\[(.*)\]$/, '$1')
  const [network = '', prefix, ...more] = bare.split('/')
  if (bare === '*') {
    allowed.addSubnet('0.0.0.0', 0, 'ipv4')
    allowed.addSubnet('::', 0, 'ipv6')
  } else if (isIP(network) !== 0 && prefix === undefined) {
    allowed.addAddress(network, family(network))
  } else if (
    isIP(network) !== 0 && more.length === 0 && /^\d{1,3}$/.test(prefix!) &&
    Number(prefix) <= (isIPv4(network) ? 32 : 128)
  ) {
    allowed.addSubnet(network, Number(prefix), family(network))
  } else if (NAME.test(bare) && !isNumeric(bare)) {
    names.push(bare.toLowerCase().replace(/\.$/, ''))
  } else {
    throw new RefitError(
      'CONFIG',
      `--allow-master ${
        JSON.stringify(pattern)
      }; expected an address, a network such as 100.64.0.0/10, a name, *.name or *`,
      { param: 'allow_master' }
    )
  }
}

function matches (host: string, name: string): boolean {
  const given = host.toLowerCase().replace(/\.$/, '')
  return name.startsWith('*.') ? given.endsWith(name.slice(1)) && given.length > name.length - 1 : given === name
}

/**
 * True if a resolver would read the host as a number (2130706433, 0x7f.1, 0177.0.0.1): its last label is a number.
 */
export function isNumeric (host: string): boolean {
  return /(?:^|\.)(?:\d+|0x[0-9a-f]*)\.?$/i.test(host)
}

function family (address: string): 'ipv4' | 'ipv6' {
  return isIPv4(address) ? 'ipv4' : 'ipv6'
}

function listOf (ranges: readonly Range[]): BlockList {
  const list = new BlockList()
  for (const [network, prefix] of ranges) list.addSubnet(network, prefix, family(network))
  return list
}
