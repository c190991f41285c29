import { faultyAddon, storeOf } from '../helpers/core.ts'
import { tinyArchitecture } from '../helpers/tiny-config.ts'
import { missingNames } from '../../src/weights/plan.ts'

export const addon = faultyAddon()
export const DEADLINE_MS = 10_000
export const ALL = missingNames(storeNames(), new Set())

function storeNames () {
  const { table, close } = storeOf(addon, tinyArchitecture('Qwen3ForCausalLM'), 2)
  close()
  return table
}

export interface Open {
  id: string
  owner: string
  scope: boolean
  expected: Set<string> | null
  written: Set<string>
  failed: Set<string>
  touched: boolean
  version: string | undefined
  until: number
}

/** The expected state. A null value means torn. */
export class Model {
  values = new Map<string, number | null>(ALL.map(name => [name, 1]))
  label = 'default'
  now = 0
  open: Open | null = null
  ended = new Map<string, 'committed' | 'aborted'>()
  lastScope: 'committed' | 'aborted' | null = null
  last = 'none yet'
  paused = false
  since: Set<string> | null = null

  end (how: 'committed' | 'aborted'): 'old' | 'new' | 'torn' {
    const { id, scope, expected, written, failed, touched } = this.open!
    const isWhole = failed.size === 0 && [...expected ?? ALL].every(name => written.has(name))
    if (how === 'aborted' && !isWhole) { for (const name of written) this.values.set(name, null) }
    this.ended.set(id, how)
    if (scope) this.lastScope = how
    this.open = null
    return !touched ? 'old' : how === 'committed' || isWhole ? 'new' : 'torn'
  }

  /** The code of the refusal of an update that names a transaction, or null. */
  door (id: string | undefined): string | null {
    if (this.open !== null && (id === undefined ? this.open.scope : id === this.open.id)) return null
    if (id !== undefined) return this.ended.has(id) ? 'TRANSACTION_ENDED' : 'NOT_FOUND'
    return this.open === null ? null : 'TRANSACTION_OPEN'
  }

  markWritten (some: readonly string[], value: number | null): void {
    for (const name of some) {
      this.values.set(name, value)
      if (value !== null) this.since?.add(name)
      else this.since?.delete(name)
    }
    if (this.open === null) return
    this.open.touched = true
    for (const name of some) {
      this.open.written[value === null ? 'delete' : 'add'](name)
      this.open.failed[value === null ? 'add' : 'delete'](name)
    }
    this.renewDeadline()
  }

  /** A scope's time starts again. */
  renewDeadline (): void {
    if (this.open?.scope === true) this.open.until = this.now + DEADLINE_MS
  }

  wait (ms: number): void {
    this.now += ms
    if (this.open !== null && this.open.until <= this.now) this.end('aborted')
  }

  commit (version: string | undefined): string | null {
    const { open } = this
    if (open === null) throw new Error('none is open')
    this.renewDeadline()
    if (open.failed.size > 0 || [...open.expected ?? []].some(name => !open.written.has(name))) {
      return 'TRANSACTION_INCOMPLETE'
    }
    this.label = version ?? open.version ?? this.label
    this.end('committed')
    return null
  }
}
