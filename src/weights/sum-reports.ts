import type { SwapTimes, WriteReport } from '../contract/weight-source.ts'

const SHOWN_NAMES = 100

/**
 * Adds up the reports of an update's writes, one after another and at least one. The last one knows which tensors are
 * missing.
 */
export function sumReports (reports: readonly WriteReport[]): WriteReport {
  const sum = (of: (report: WriteReport) => number): number => reports.reduce((total, report) => total + of(report), 0)
  const { source, missing, missingCount } = reports.at(-1)!
  const bytes = sum(report => report.bytes)
  const write = sum(({ ms }) => ms.write)
  return {
    source,
    tensors: sum(({ tensors }) => tensors),
    bytes,
    ...reports.some(({ bytesInPlace }) => bytesInPlace !== undefined)
      ? { bytesInPlace: sum(({ bytesInPlace = 0 }) => bytesInPlace) }
      : {},
    missing,
    missingCount,
    ignored: [...new Set(reports.flatMap(({ ignored }) => ignored))].slice(0, SHOWN_NAMES),
    ms: {
      plan: sum(({ ms }) => ms.plan),
      gate: sum(({ ms }) => ms.gate),
      write,
      verify: sum(({ ms }) => ms.verify),
      total: sum(({ ms }) => ms.total)
    },
    gbPerSecond: bytes / 1e6 / Math.max(write, 1e-3)
  }
}

/** The part of a report's times that a swap of the sets of weights adds. */
export function swapTimes (swapped: SwapTimes | null | undefined): Partial<SwapTimes> {
  return swapped == null ? {} : { copy: swapped.copy, swap: swapped.swap }
}
