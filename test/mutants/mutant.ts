/** A bug that somebody might make: `before` becomes `after` in one file, and one of the tests should fail. */
export interface Mutant {
  file: string
  /** Occurs once in the file. */
  before: string
  after: string
  /** The tests that should notice, the fastest first: of npm test, of native/test, or of native/test/gpu. */
  tests: readonly string[]
  /** The fault that it plants. */
  why: string
}
