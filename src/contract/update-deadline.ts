/**
 * How long a weight update, or a release of memory, waits for running requests and for the updates before it. It is the
 * default of --update-deadline and of createEngine.
 */
export const UPDATE_DEADLINE_SECONDS = 300
