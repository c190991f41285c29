import type { Logger } from 'pino'
import type { RefitError } from '../errors.ts'

/** EX_SOFTWARE of sysexits.h. docs/configuration.md documents it for process supervisors. */
export const LOST_DEVICE_EXIT = 70
/** Time for the replies of the requests that have just failed. */
const REPLIES_MS = 300

/**
 * Ends a server whose engine is gone, so that its supervisor can start it again. If only the scheduler failed, it shuts
 * down in the ordinary way. If a device is lost it calls `end`, because stuck threads would block any other exit.
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
