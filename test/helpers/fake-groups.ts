import { MESSAGE, MESSAGE_FIELDS, PART_FIELDS } from '../../src/native/groups.ts'
import type { NcclGroupOptions, NativeGroups } from '../../src/native/groups.ts'
import type { GroupHost } from '../../src/contract/group-host.ts'

/** Calls that no step may run beside, whichever weights the bytes go to. */
const SETTLES = ['connect', 'stage', 'barrier', 'end']

/** `slot` null: straight into the weights. */
export interface Received {
  slot: number | null
  parts: number[][]
  gate: boolean
}

/**
 * NativeGroups without a network: every receive waits until the test releases it, and records whether the gate was
 * shut. Throws on a breach of contract: a call without the gate that it needs, two receives at once, a slot that is too
 * small.
 */
export class FakeGroups {
  readonly log: string[] = []
  readonly received: Received[] = []
  readonly made: NcclGroupOptions[] = []
  /** The messages of each call, with the fields of MESSAGE. */
  readonly messages: Array<Array<Record<'mine' | 'other' | 'into' | 'offset' | 'bytes', number>>> = []
  /** Broadcasts that were sent and not received yet. */
  sent = 0
  gateIsShut = false
  shuts = 0
  readonly #isNccl: boolean
  readonly #staged = new Map<number, { bytes: number, slots: number }>()
  readonly #begun: Array<[slot: number, parts: Float64Array]> = []
  /** [bytes, slots] of each call. */
  readonly staged: Array<[bytes: number, slots: number]> = []
  #groups = 0
  #receiving = false
  #wake: () => void = () => {}
  #fail: ((error: Error) => void) | undefined
  /** The place in the weights of a broadcast that begins at a byte of the stream; -1: it is staged. */
  placeOf: (begin: number) => number = () => -1
  /** Set to make the next receive fail. */
  fault: Error | null = null

  /** Bytes go into a second set of weights: only `SETTLES` need the gate. */
  besideSteps = false
  /** The sets of weights that were received into. */
  readonly sets: Array<number | undefined> = []

  /** Pieces that have not been awaited yet. */
  get begun (): number {
    return this.#begun.length
  }

  constructor ({ isNccl }: { isNccl: boolean }) {
    this.#isNccl = isNccl
  }

  /** Sends this many broadcasts. */
  send (count = 1): void {
    this.sent += count
    this.#wake()
  }

  get host (): GroupHost {
    return {
      native: this.native,
      core: 7,
      device: this.#isNccl ? 'cuda' : 'cpu',
      ranks: 2,
      runBetweenSteps: async run => await this.shut(run)
    }
  }

  async shut<T> (run: () => Promise<T>): Promise<T> {
    while (this.gateIsShut) await new Promise(setImmediate)
    this.gateIsShut = true
    this.shuts++
    try {
      return await run()
    } finally {
      this.gateIsShut = false
    }
  }

  get native (): NativeGroups {
    const note = (what: string): void => {
      this.log.push(what)
    }
    const requireGate = (what: string): void => {
      note(what)
      const isOpen = this.#isNccl && !this.gateIsShut
      if (isOpen && (!this.besideSteps || SETTLES.includes(what))) throw new Error(`${what} with the gate open`)
    }
    const receive = async (what: string, group: number, slot: number | null, parts: Float64Array): Promise<void> => {
      requireGate(what)
      if (this.#receiving) throw new Error('two receives at once')
      this.#receiving = true
      try {
        await this.#come(group, slot, parts)
      } finally {
        this.#receiving = false
      }
    }
    const fake = {
      glooGroup: ({ ranks }: { ranks: number[] }) => ({
        group: ++this.#groups,
        addresses: ranks.map(rank => Uint8Array.of(rank))
      }),
      glooConnect: async () => {
        note('connect')
      },
      ncclGroup: (_core: number, options: NcclGroupOptions) => {
        this.made.push(options)
        return ++this.#groups
      },
      ncclUniqueId: () => Buffer.alloc(128, 9),
      ncclConnect: async () => {
        requireGate('connect')
      },
      stageGroup: async (group: number, bytes: number, slots: number) => {
        requireGate('stage')
        this.staged.push([bytes, slots])
        this.#staged.set(group, { bytes, slots })
      },
      groupBarrier: async () => {
        requireGate('barrier')
      },
      groupAbort: (_group: number, reason: string) => {
        note('abort')
        // The first failure stays.
        this.#fail?.(this.fault ?? nativeError('GROUP_BROKEN', reason))
      },
      endGroup: async () => {
        requireGate('end')
      },
      groupPlaces: (_group: number, parts: Float64Array) => {
        note('places')
        return Float64Array.from(
          { length: parts.length / PART_FIELDS },
          (_, part) => this.placeOf(parts[part * PART_FIELDS]!)
        )
      },
      groupReceiveInPlace: async (group: number, parts: Float64Array, _root: number, _ms: number, set?: number) => {
        this.sets.push(set)
        await receive('in place', group, null, parts)
      },
      groupReceive: async (group: number, slot: number, parts: Float64Array) => {
        await receive('receive', group, slot, parts)
      },
      groupBegin: async (_group: number, slot: number, parts: Float64Array) => {
        requireGate('begin')
        if (this.#begun.length === 2) throw new Error('both slots are being received into')
        if (this.#begun.some(([other]) => other === slot)) throw new Error(`slot ${slot} is being received into`)
        this.#begun.push([slot, parts])
      },
      groupBeginMessages: async (_group: number, slot: number, rows: Float64Array) => {
        requireGate('messages')
        if (this.#begun.some(([other]) => other === slot)) throw new Error(`slot ${slot} is being received into`)
        const field = (index: number, field: number): number => rows[index * MESSAGE_FIELDS + field]!
        const messages = Array.from({ length: rows.length / MESSAGE_FIELDS }, (_, index) => ({
          mine: field(index, MESSAGE.mine),
          other: field(index, MESSAGE.other),
          into: field(index, MESSAGE.into),
          offset: field(index, MESSAGE.offset),
          bytes: field(index, MESSAGE.bytes)
        }))
        this.messages.push(messages)
        // Bytes for parameters need no room in the slot.
        this.#begun.push([
          slot,
          Float64Array.from(messages.flatMap(({ into, offset, bytes }) => into === 0 ? [offset, bytes] : [0, 0]))
        ])
      },
      groupRead: async (_group: number, _slot: number, _offset: number, bytes: number) => new Uint8Array(bytes),
      groupArrive: async (group: number) => {
        const [slot, parts] = this.#begun[0]!
        try {
          await receive('receive', group, slot, parts)
        } finally {
          this.#begun.shift()
        }
      }
    }
    return fake as unknown as NativeGroups
  }

  async #come (group: number, slot: number | null, parts: Float64Array): Promise<void> {
    const list: number[][] = []
    for (let at = 0; at < parts.length; at += PART_FIELDS) {
      const [offset, bytes] = [parts[at]!, parts[at + 1]!]
      const staged = this.#staged.get(group) ?? { bytes: 0, slots: 0 }
      if (slot !== null && (slot >= staged.slots || offset + bytes > staged.bytes)) {
        throw new Error(`${offset} + ${bytes} bytes in slot ${slot} of ${staged.slots} of ${staged.bytes} bytes`)
      }
      while (this.sent === 0 && this.fault === null) {
        await new Promise<void>((resolve, reject) => {
          this.#wake = resolve
          this.#fail = reject
        })
      }
      if (this.fault !== null) throw this.fault
      this.sent--
      list.push([offset, bytes])
    }
    this.received.push({ slot, parts: list, gate: this.gateIsShut })
  }
}

export function nativeError (code: string, message: string): Error {
  return Object.assign(new Error(message), { code })
}
