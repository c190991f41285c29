import { getHeapSpaceStatistics, setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'

// V8 stops a thread for 1 to 4 ms when its space for new objects is full, which may be amid the delivery of a step's
// tokens. A thread that has to wait anyway collects its young garbage before that.

type Collect = (options: { type: 'minor' }) => void

/**
 * V8's collector, which it gives to contexts that are made under a flag of the process. The flag is as before at the
 * end. Another thread may reset it in between, so this tries again; without a collector all works as V8 has it.
 */
function collector (): Collect | null {
  const take = (): Collect | null => runInNewContext('typeof gc === "function" ? gc : null') as Collect | null
  for (let tries = 0; tries < 10; tries++) {
    // A process that was started with the flag keeps it.
    const given = take()
    if (given !== null) return given
    setFlagsFromString('--expose-gc')
    const taken = take()
    setFlagsFromString('--no-expose-gc')
    if (taken !== null) return taken
  }
  return null
}

const collect = collector()

/** Collects this thread's young garbage if there is so much that the collection is due soon. */
export function collectYoungGarbage (): void {
  const space = getHeapSpaceStatistics().find(({ space_name: name }) => name === 'new_space')
  if (space !== undefined && space.space_used_size > 3 * space.space_available_size) collect?.({ type: 'minor' })
}
