import { getHeapSpaceStatistics, setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'

// V8 stops a thread for 1 to 4 ms when its space for new objects is full, which may be amid the delivery of a step's
// tokens. A thread that has to wait anyway collects its young garbage before that. V8 gives its collector only to
// JavaScript that is made after this flag, so no other code of the process sees a global of this name.
setFlagsFromString('--expose-gc')
const collect = runInNewContext('gc') as (options: { type: 'minor' }) => void
setFlagsFromString('--no-expose-gc')

/** Collects this thread's young garbage if there is so much that the collection is due soon. */
export function collectYoungGarbage (): void {
  const space = getHeapSpaceStatistics().find(({ space_name: name }) => name === 'new_space')
  if (space !== undefined && space.space_used_size > 3 * space.space_available_size) collect({ type: 'minor' })
}
