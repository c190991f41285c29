import { errorMessage, RefitError } from '../errors.ts'
import type { ErrorCode } from '../errors.ts'
import type { GroupSpec } from './group-spec.ts'
import { fromNativeGroup } from './native-group-errors.ts'

/** `process group "g" (gloo, ranks 1-2 of 3, store at 10.0.0.7:29500)`. */
export function describeGroup (
  { name, backend, rankOffset, worldSize, address, port }: GroupSpec,
  ranks: number
): string {
  const own = ranks === 1 ? `rank ${rankOffset}` : `ranks ${rankOffset}-${rankOffset + ranks - 1}`
  return `process group "${name}" (${backend}, ${own} of ${worldSize}, store at ${
    address.includes(':') ? `[${address}]` : address
  }:${port})`
}

/** The group's code for an error of the store or of the gate. */
const MEANS: Partial<Record<ErrorCode, ErrorCode>> = {
  DEADLINE: 'GROUP_TIMEOUT',
  STORE_UNREACHABLE: 'GROUP_BROKEN',
  STORE_PROTOCOL: 'GROUP_BROKEN'
}
/** Errors with these codes are complete: group and phase are not added. */
const WHOLE: ReadonlySet<ErrorCode> = new Set<ErrorCode>(['INVALID_REQUEST', 'MASTER_REFUSED', 'UNSUPPORTED'])

/** An error of a group: its phase, the time that passed, and the message of the addon or the store. */
export function groupError (group: string, phase: string, elapsedMs: number, error: unknown): RefitError {
  if (error instanceof RefitError && WHOLE.has(error.code)) return error
  const { code, message } = error instanceof RefitError
    ? { code: MEANS[error.code] ?? error.code, message: error.message }
    : fromNativeGroup(error) ?? { code: 'INTERNAL' as const, message: errorMessage(error) }
  return new RefitError(code, `${group}: ${phase} failed after ${(elapsedMs / 1000).toFixed(1)} s: ${message}`, {
    cause: error
  })
}

/**
 * Adds the tensor's name to an error of the addon that contains the number of a broadcast in its piece. gloo sends
 * ahead, so a later broadcast may be at fault; that one is named too.
 */
export function namePart (error: unknown, nameOf: (part: number) => string): unknown {
  const { message = '', code } = error as { message?: string, code?: unknown }
  const at = /of broadcast (\d+) \(part (\d+) of (\d+)/.exec(message)
  const named = message
    .replace(/\(part (\d+) of \d+/, (found, part: string) => `${found}, ${nameOf(Number(part))}`)
    .replace(/in broadcast (\d+), expected/, (found, broadcast: string) => {
      const part = at === null ? 0 : Number(at[2]) + Number(broadcast) - Number(at[1])
      return part >= 1 && part <= Number(at![3]) ? `in broadcast ${broadcast} (${nameOf(part)}), expected` : found
    })
  return Object.assign(new Error(named, { cause: error }), { code })
}

/** `"a"`, or `"a" to "d" (4 tensors)`. */
export function nameRange (names: readonly string[]): string {
  return names.length === 1 ? `"${names[0]!}"` : `"${names[0]!}" to "${names.at(-1)!}" (${names.length} tensors)`
}
