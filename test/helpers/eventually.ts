const LONGEST_MS = 60_000

/**
 * What `call` gives as soon as `is` holds for it: for outcomes that a machine which halts at the wrong moment puts off.
 * Where none comes for a minute, the last one, so that the test says what it was.
 */
export async function eventually<T> (call: () => Promise<T> | T, is: (value: T) => boolean): Promise<T> {
  const end = performance.now() + LONGEST_MS
  for (;;) {
    const value = await call()
    if (is(value) || performance.now() > end) return value
  }
}

/** The error that it ends with; null where it ends well. */
export async function failureOf (promise: Promise<unknown>): Promise<Error & { code?: string } | null> {
  return await promise.then(() => null, (error: Error) => error)
}
