import { destination, pino } from 'pino'
import type { Logger } from 'pino'
import pretty from 'pino-pretty'

export type Log = Logger

/** The message with control characters as escapes: a client's text must not move the cursor or forge a line. */
export function printable (log: Readonly<Record<string, unknown>>, key: string): string {
  return String(log[key] ?? '').replace(
    CONTROL,
    character => `\\x${character.charCodeAt(0).toString(16).padStart(2, '0')}`
  )
}

// eslint-disable-next-line no-control-regex -- it is about control characters
const CONTROL = /[\0-\x1f\x7f-\x9f\u2028\u2029]/g

/**
 * JSON lines on stdout, or coloured text if stdout is a terminal. Written synchronously: nothing is lost when the
 * process ends.
 */
export function createLog (level: string): Logger {
  if (!process.stdout.isTTY) return pino({ level }, destination({ dest: 1, sync: true }))
  return pino(
    { level },
    pretty({
      sync: true,
      ignore: 'pid,hostname',
      translateTime: 'SYS:HH:MM:ss',
      singleLine: true,
      messageFormat: printable
    })
  )
}
