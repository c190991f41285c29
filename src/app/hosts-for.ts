import { isLoopback } from '../config/load-config.ts'
import type { PageOptions } from '../http/pages.ts'

/**
 * The allowed hosts of a server that listens on `address`. Who reaches loopback names loopback, so every other name is
 * refused there. Elsewhere a server has names that it does not know: DNS, containers, Kubernetes.
 */
export function hostsFor (address: string, allowed: PageOptions['allowedHosts']): PageOptions['allowedHosts'] {
  return allowed === undefined && isLoopback(address) ? [] : allowed
}
