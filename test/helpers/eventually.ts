const LONGEST_MS = 60_000

/**
 * Calls until `is` accepts the result, for outcomes that a slow machine delays. After a minute it returns the last
 * result, so the test can show it.
 */
export async function eventually<T> (call: () => Promise<T> | T, is: (value: T) => boolean): Promise<T> {
  const end = performance.now() + LONGEST_MS
  for (;;) {
    const value = await call()
    if (is(value) || performance.now() > end) return value
  }
}

/** The error that it rejects with; null if it resolves. */
export async function failureOf (promise: Promise<unknown>): Promise<Error & { code?: string } | null> {
  return await promise.then(() => null, (error: Error) => error)
}
