/**
 * A step failed because the device can compute no more. Not a RefitError: it ends the scheduler, and the main thread
 * fails the requests.
 */
export class LostDevice extends Error {
  /** Numbers of the requests in the step. */
  readonly ids: number[]

  constructor (message: string, ids: number[]) {
    super(message)
    this.ids = ids
  }
}

export function isLost (error: unknown): error is Error {
  return error instanceof Error && (error as { code?: unknown }).code === 'DEVICE_LOST'
}

const NAMED_REQUESTS = 20

/** The end of an error's text that names the requests of a step. */
export function namedInStep (rids: readonly string[]): string {
  if (rids.length === 0) return ''
  const more = rids.length > NAMED_REQUESTS ? ` and ${rids.length - NAMED_REQUESTS} more` : ''
  return `; requests in the step: ${rids.slice(0, NAMED_REQUESTS).join(', ')}${more}`
}
