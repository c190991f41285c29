import { ExportResultCode } from '@opentelemetry/core'
import type { ExportResult } from '@opentelemetry/core'

export interface FailureLog {
  info: (message: string) => void
  warn: (message: string) => void
}

/**
 * Logs the first failure in a row of an exporter, and its next success: OpenTelemetry drops what it cannot send and
 * keeps quiet, and a line for each try would fill the log.
 */
export function reportFailures<T> (
  exporter: { export: (items: T, done: (result: ExportResult) => void) => void },
  what: string,
  log: FailureLog
): void {
  const send = exporter.export.bind(exporter)
  let isFailing = false
  exporter.export = (items, done) => {
    send(items, result => {
      const failed = result.code === ExportResultCode.FAILED
      if (failed && !isFailing) {
        log.warn(`telemetry: ${what} cannot be sent to the collector, and are dropped: ${reasonOf(result.error)}`)
      } else if (!failed && isFailing) log.info(`telemetry: ${what} reach the collector again`)
      isFailing = failed
      done(result)
    })
  }
}

/** A refused connection to a name with several addresses is an error without a message. */
function reasonOf (error: (Error & { code?: unknown }) | undefined): string {
  return [error?.message, error?.code].find(text => text !== undefined && text !== '') as string ?? 'no reason is known'
}
