// Long work on the event loop, such as writing a million scores as JSON, is done in slices. All such work of the
// process shares the time: however many requests have some, other callbacks run after at most one slice.

/** Longest work in one turn of the event loop. */
const SLICE_MS = 8

/** When the work of this turn began; -1 for none. */
let began = -1
const waiting: (() => void)[] = []

/** False: await `nextTurn` before the next piece of work, which should take less than a millisecond. */
export function hasTime (): boolean {
  if (began < 0) begin()
  return performance.now() - began < SLICE_MS
}

/** Resolves in a later turn of the event loop; callers take turns. */
export async function nextTurn (): Promise<void> {
  await new Promise<void>(resolve => {
    waiting.push(resolve)
    if (waiting.length === 1) setImmediate(resume)
  })
}

function resume (): void {
  begin()
  waiting.shift()!()
  if (waiting.length > 0) setImmediate(resume)
}

function begin (): void {
  began = performance.now()
  setImmediate(() => {
    began = -1
  })
}
