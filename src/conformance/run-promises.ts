import type { Context } from './context.ts'
import { Broken, NotOffered } from './promise.ts'
import type { ConformancePromise, Row, Way } from './promise.ts'

export interface RunOptions {
  /** Rows whose names contain it. */
  only?: string | undefined
  onRow?: (row: Row) => void
  /** Ends the run after the promise that is checked. */
  signal?: AbortSignal
}

/** `group/id (way)` */
export function nameRow ({ group, id }: { group: string, id: string }, way: string): string {
  return `${group}/${id}${way === '' ? '' : ` (${way})`}`
}

/**
 * Checks promises one after another, each with variant A in place. If A cannot be put in place again, the rest is not
 * run.
 */
export async function runPromises (
  context: Context,
  promises: readonly ConformancePromise[],
  { only = '', onRow = () => {}, signal }: RunOptions = {}
): Promise<Row[]> {
  const rows: Row[] = []
  let stuck: string | null = null
  for (const promise of promises) {
    for (const way of waysOf(context, promise)) {
      if (signal?.aborted === true || !nameRow(promise, way.name).includes(only)) continue
      const began = performance.now()
      const result: Pick<Row, 'verdict' | 'detail'> = way.missing !== undefined
        ? { verdict: 'not offered', detail: way.missing }
        : stuck !== null
        ? { verdict: 'not run', detail: stuck }
        : await checkOne(context, promise, way)
      if (result.verdict !== 'not offered' || way.missing === undefined) {
        stuck ??= await restore(context)
        if (stuck !== null && result.verdict !== 'not run') {
          result.detail = `${result.detail}${result.detail === '' ? '' : '; '}${stuck}`
          result.verdict = 'broken'
        }
      }
      const { group, id, title } = promise
      const seconds = Math.round(performance.now() - began) / 1000
      const row: Row = { group, id, way: way.name, title, ...result, seconds }
      rows.push(row)
      onRow(row)
    }
  }
  return rows
}

function waysOf (context: Context, promise: ConformancePromise): readonly Way[] {
  const ways = promise.ways(context)
  return ways.length > 0 ? ways : [{ name: '', missing: `no route of ${context.server.kind} is for this` }]
}

async function checkOne (
  context: Context,
  promise: ConformancePromise,
  way: Way
): Promise<Pick<Row, 'verdict' | 'detail'>> {
  try {
    return { verdict: 'kept', detail: await promise.check(context, way) ?? '' }
  } catch (error) {
    if (error instanceof NotOffered) return { verdict: 'not offered', detail: error.message }
    if (error instanceof Broken) return { verdict: 'broken', detail: error.message }
    throw error
  }
}

/** Null, or why variant A is not in place. */
async function restore (context: Context): Promise<string | null> {
  try {
    await context.restore()
    return null
  } catch (error) {
    if (error instanceof Broken) return `afterwards A could not be put in place: ${error.message}`
    throw error
  }
}
