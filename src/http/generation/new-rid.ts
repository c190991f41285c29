import { randomUUID } from 'node:crypto'

/** The name of a request that has none. */
export function newRid (): string {
  return randomUUID().replaceAll('-', '')
}
