import { errorMessage, RefitError } from '../errors.ts'
import { fromNativeGroup } from '../process-groups/native-group-errors.ts'

/**
 * Waits for all promises, because each may use memory that the caller frees afterwards, and then throws the first
 * error. `failed` is called once, as soon as the first error occurs.
 */
export async function allOf<T> (
  work: readonly Promise<T>[],
  failed: (reason: string, error: unknown) => void = () => {}
): Promise<T[]> {
  let first: { error: unknown } | undefined
  const results = await Promise.allSettled(work.map(async promise =>
    await promise.catch((error: unknown) => {
      if (first === undefined) {
        first = { error }
        failed(`another link of the transfer failed: ${errorMessage(error)}`, error)
      }
      throw error
    })
  ))
  if (first !== undefined) throw asRefitError(first.error)
  return results.map(result => (result as PromiseFulfilledResult<T>).value)
}

/** Turns an error of the addon's groups into a RefitError. */
export function asRefitError (error: unknown): unknown {
  if (error instanceof RefitError || !(error instanceof Error)) return error
  const { code } = error as { code?: unknown }
  if (code === 'NO_MEMORY' || code === 'DEVICE_LOST') return error
  const failure = fromNativeGroup(error)
  return failure === null ? error : new RefitError(failure.code, failure.message, { cause: error })
}
