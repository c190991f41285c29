import type { Logger } from 'pino'
import type { RefitError } from '../errors.ts'

/** EX_SOFTWARE of sysexits.h; docs/configuration.md tells it to whoever watches the process. */
export const LOST_DEVICE_EXIT = 70
/** For the replies of the requests that have just failed. */
const REPLIES_MS = 300

/**
 * A server whose engine is gone ends, so that whoever watches it can start it again: by the ordinary way down where only the
 * scheduler failed, by `end` where a device is lost, since threads that are stuck in it would hold up any other.
 */
export function endOnFailure (error: RefitError, log: Pick<Logger, 'fatal'>, end: (exitCode: number) => void): void {
  if (error.code !== 'DEVICE_LOST') {
    setImmediate(() => {
      throw error
    })
    return
  }
  log.fatal({ code: error.code }, `device lost: ${error.message}. Ending with exit code ${LOST_DEVICE_EXIT}`)
  setTimeout(() => {
    end(LOST_DEVICE_EXIT)
  }, REPLIES_MS)
}
