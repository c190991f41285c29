import { RefitError } from '../../errors.ts'
import type { PlainValue } from '../../wire/torch/plain.ts'
import { runLoader } from '../disk/run-loader.ts'
import type { OpenTensors } from '../disk/run-loader.ts'
import type { HandleHold } from './tensor.ts'
import type { WeightLoader } from '../disk/weight-loader.ts'

export interface HeldTensors extends OpenTensors {
  hold: HandleHold
}

const BUILT_IN = ['flattened_bucket', 'direct', 'auto', 'null', '']

/** Throws TypeError for a name that has a meaning already, and for a value that is no function. */
export function checkLoaders (loaders: Readonly<Record<string, WeightLoader>>): ReadonlyMap<string, WeightLoader> {
  for (const [name, loader] of Object.entries(loaders)) {
    if (BUILT_IN.includes(name)) {
      throw new TypeError(`a weight loader cannot be named ${JSON.stringify(name)}: that load_format is refit's own`)
    }
    if (typeof loader !== 'function') {
      throw new TypeError(`the weight loader ${JSON.stringify(name)} is a ${typeof loader}, not a function`)
    }
  }
  return new Map(Object.entries(loaders))
}

/**
 * Runs a loader on a request's tensors. The result holds them and the pickles that the loader opened, to be released
 * together. After a failure all of them are released.
 */
export async function loadTensors (
  name: string,
  loader: WeightLoader,
  opened: HeldTensors,
  openPickle: (bytes: Uint8Array, classes: readonly string[]) => Promise<HeldTensors & { value: PlainValue }>
): Promise<HeldTensors> {
  const holds = [opened.hold]
  const pending = new Set<Promise<unknown>>()
  const unpickle = async (
    bytes: Uint8Array,
    classes: readonly string[]
  ): Promise<OpenTensors & { value: PlainValue }> => {
    const more = await openPickle(bytes, classes)
    holds.push(more.hold)
    return more
  }
  try {
    const loaded = await runLoader({
      name,
      loader,
      opened,
      unpickle: async (bytes, classes) => {
        const opening = unpickle(bytes, classes)
        pending.add(opening)
        return await opening
      }
    })
    // A pickle that the loader did not await is held as well.
    await Promise.allSettled(pending)
    return { ...loaded, hold: join(holds) }
  } catch (error) {
    await Promise.allSettled(pending)
    await join(holds).release()
    throw error
  }
}

/** The error for a loader that does not exist. */
export function unknownFormat (loadFormat: string, loaders: Iterable<string>): RefitError {
  const names = ['null', '"flattened_bucket"', '"direct"', ...[...loaders].map(name => JSON.stringify(name))]
  return new RefitError(
    'UNSUPPORTED',
    `load_format: expected ${names.slice(0, -1).join(', ')} or ${names.at(-1)}, got ${
      JSON.stringify(loadFormat)
    }; others are registered by --weight-loader`,
    { param: 'load_format' }
  )
}

function join (holds: readonly HandleHold[]): HandleHold {
  return {
    isOpen: () => holds.every(hold => hold.isOpen()),
    findGone: async () => {
      for (const hold of holds) {
        const gone = await hold.findGone()
        if (gone !== null) return gone
      }
      return null
    },
    release: async () => {
      await Promise.all(holds.map(async hold => {
        await hold.release()
      }))
    }
  }
}
