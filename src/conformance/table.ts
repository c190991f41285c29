import { nameRow } from './run-promises.ts'
import type { ConformancePromise, Row, Verdict } from './promise.ts'

const VERDICTS: readonly Verdict[] = ['kept', 'broken', 'not offered', 'not run']
const WIDTH = 11

/** One line of the table. */
export function describeRow (row: Row): string {
  const { verdict, title, detail, way } = row
  const line = `${verdict.padEnd(WIDTH)}  ${nameRow(row, way)}`
  // A title explains a promise that needs attention; for the others it is in the list.
  return verdict === 'broken'
    ? `${line}\n${' '.repeat(WIDTH + 2)}promised: ${title}\n${' '.repeat(WIDTH + 2)}observed: ${detail}`
    : detail === ''
    ? line
    : `${line}: ${detail}`
}

/** `12 kept, 0 broken, 3 not offered` */
export function summarise (rows: readonly Row[]): string {
  return VERDICTS
    .map(verdict => ({ verdict, count: rows.filter(row => row.verdict === verdict).length }))
    .filter(({ verdict, count }) => count > 0 || verdict === 'kept' || verdict === 'broken')
    .map(({ verdict, count }) => `${count} ${verdict}`)
    .join(', ')
}

/** The promises with their titles. */
export function listPromises (promises: readonly ConformancePromise[]): string {
  const width = Math.max(...promises.map(promise => nameRow(promise, '').length))
  return promises.map(promise => `${nameRow(promise, '').padEnd(width)}  ${promise.title}\n`).join('')
}
