import type { Test } from 'tap'
import { setImmediate as turn } from 'node:timers/promises'
import { faultyAddon, storeOf } from '../helpers/core.ts'
import { ManualClock } from '../helpers/manual-clock.ts'
import { codedChecksum, memorySource, MEMORY } from '../helpers/memory-source.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'
import { RefitError } from '../../src/errors.ts'
import { missingNames } from '../../src/weights/plan.ts'
import type { StoredSource, StreamedSource, WeightSource } from '../../src/contract/weight-source.ts'

// Transactions over a real core, with gates that no scheduler holds and a clock that the test moves.

export const addon = faultyAddon()

export async function setup (t: Test, architecture: Parameters<typeof tinyArchitecture>[0] = 'Qwen3ForCausalLM') {
  const clock = new ManualClock()
  const made = storeOf(addon, tinyArchitecture(architecture), 2, 'bfloat16', { clock, deadlineMs: 60_000 })
  const { store, table, gates } = made
  const names = missingNames(table, new Set())
  const middle = names.length >> 1
  /** The calls of an update route for one request. */
  const send = async (
    source: WeightSource,
    { transaction, version }: { transaction?: string, version?: string } = {}
  ) => {
    const update = await store.update(transaction === undefined ? {} : { transaction })
    try {
      const report = await update.write(source)
      await update.commit({ flushCache: true, allowTorn: true, ...version === undefined ? {} : { version } })
      return report
    } catch (error) {
      await update.abort('it failed')
      throw error
    }
  }
  const write = async (variant: number, some = names, options: { transaction?: string, version?: string } = {}) =>
    await send(memorySource(table, some, variant), options)
  const holds = async (t: Test, variantOf: (name: string) => number | null): Promise<void> => {
    const { tensors } = await store.checksums()
    const known = tensors.filter(({ name }) => variantOf(name) !== null)
    t.same(known, known.map(({ name }) => ({ name, checksum: codedChecksum(table, name, variantOf(name)!) })))
  }
  const torn = (): string[] => store.state.state === 'torn' ? store.state.tensors : []
  t.teardown(async () => {
    addon.armFault!(null)
    await store.close()
    made.close()
  })
  await write(1)
  return {
    ...made,
    clock,
    names,
    first: names.slice(0, middle),
    second: names.slice(middle),
    send,
    write,
    holds,
    torn,
    shut: () => gates.shutCount - gates.openCount
  }
}

/** A source that stops inside the gate until `go` is called, and fails then if `go` gets an error. */
export function held (
  source: WeightSource
): { source: WeightSource, inside: Promise<void>, go: (error?: Error) => void } {
  let arrive = (): void => {}
  let go: (error?: Error) => void = () => {}
  const inside = new Promise<void>(resolve => {
    arrive = resolve
  })
  const going = new Promise<void>((resolve, reject) => {
    go = error => {
      error === undefined ? resolve() : reject(error)
    }
  })
  going.catch(() => {})
  return {
    source: {
      ...source,
      verify: async () => {
        arrive()
        await going
      }
    },
    inside,
    go
  }
}

/** A source that changes during its write: all its tensors are torn. */
export function breaking (source: WeightSource): WeightSource {
  let calls = 0
  return {
    ...source,
    verify: async () => {
      if (++calls === 2) throw new RefitError('CHECKPOINT_CHANGED', 'it moved')
    }
  }
}

const PIECE_OVERLAP = 4
/** Pieces of a streamed source in tests that cut it. */
export const PIECES = 40

/** The bytes of a source in pieces, one after another; pieces after `last` never come. */
export function streamed (
  source: StoredSource,
  pieces: number,
  last = pieces
): { source: StreamedSource, begun: Promise<void>, given: () => number } {
  const { buffer } = source.sources[0] as { buffer: Buffer }
  const size = Math.ceil(buffer.length / pieces)
  let given = 0
  let begin = (): void => {}
  const begun = new Promise<void>(resolve => {
    begin = resolve
  })
  const next = async () => {
    await turn()
    if (given === pieces) return undefined
    if (given === last) return await new Promise<never>(() => {})
    const at = Math.max(0, given * size - PIECE_OVERLAP)
    const bytes = buffer.subarray(at, ++given * size)
    if (given === last) begin()
    return { begin: at, length: bytes.length, source: { buffer: bytes } }
  }
  const { tensors, verify, close } = source
  const stream = { ready: async () => {}, next }
  return {
    source: { kind: 'streamed', transport: MEMORY, tensors, verify, close, stream },
    begun,
    given: () => given
  }
}
