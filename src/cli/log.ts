import { pino } from 'pino'
import type { Logger } from 'pino'
import pretty from 'pino-pretty'

/**
 * JSON lines on stdout, or coloured text if stdout is a terminal. Written synchronously: nothing is lost when the
 * process ends.
 */
export function createLog (level: string): Logger {
  if (!process.stdout.isTTY) return pino({ level })
  return pino(
    { level },
    pretty({ sync: true, ignore: 'pid,hostname', translateTime: 'SYS:HH:MM:ss', singleLine: true })
  )
}
