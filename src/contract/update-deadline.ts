/**
 * How long a weight update, or a release of memory, waits for running requests and for the updates before it. It is the
 * default of --update-deadline and of createEngine.
 */
export const UPDATE_DEADLINE_SECONDS = 300

/** How long requests may finish on the weights before a swap (`OnRunning`): the default of --old-weights-timeout. */
export const OLD_WEIGHTS_TIMEOUT_SECONDS = 60

/** Longest delay of a timer: Node.js fires a longer one at once. */
export const LONGEST_TIMER_MS = 2 ** 31 - 1
