import type { MemoryReport, MemoryTag, ServingEngine } from '../../contract/rollout-engine.ts'
import { RefitError } from '../../errors.ts'

export type VllmMode = 'abort' | 'wait' | 'keep'

export interface SleepRequest {
  /**
   * 0: only pause; 1: weights are restored at wake-up; 2: weights are empty after wake-up, until an update writes them.
   */
  level: number
  mode: VllmMode
  /** Kinds of memory; all of them if the list is empty. */
  tags: readonly string[]
}

/** The memory of each tag of vLLM. CUDA graphs are a part of its cache tag. */
const TAGS: Readonly<Record<string, readonly MemoryTag[]>> = {
  weights: ['weights'],
  kv_cache: ['kv_cache', 'cuda_graph'],
  cuda_graph: ['cuda_graph']
}
/** This tag is no memory, only a pause. */
const SCHEDULING = 'scheduling'
const NOTHING: MemoryReport = { tags: [], bytes: 0, ms: 0 }

/**
 * vLLM's sleep and wake on the engine's memory. A call that has nothing to change succeeds, so a retry does no harm. A
 * pause that a sleep began ends when all memory is back; a pause that the trainer requested stays.
 */
export class VllmSleep {
  readonly #engine: ServingEngine
  #ownsPause = false
  /** The end of the last call, and the number of calls that have not ended. */
  #last: Promise<unknown> = Promise.resolve()
  #underWay = 0

  constructor (engine: ServingEngine) {
    this.#engine = engine
  }

  get isSleeping (): boolean {
    return this.#released.length > 0 || this.#ownsPause
  }

  /** The trainer paused or resumed itself, so a wake-up no longer ends the pause. */
  disown (): void {
    this.#ownsPause = false
  }

  async sleep ({ level, mode, tags: names }: SleepRequest): Promise<MemoryReport> {
    const wanted = memoryTags(names)
    if (level === 0) {
      await this.#pause(mode === 'abort' ? 'abort' : mode === 'wait' ? 'wait' : 'in_place')
      return NOTHING
    }
    const missing = (): MemoryTag[] => (wanted ?? TAGS_IN_ORDER).filter(tag => !this.#released.includes(tag))
    // An earlier sleep may be waiting for these requests.
    if (mode === 'abort' && this.#underWay > 0 && missing().length > 0) this.#engine.abortAll()
    return await this.#inTurn(async () => {
      const tags = missing()
      if (tags.length === 0) return NOTHING
      // With `wait`, releasing memory waits for running requests.
      if (mode === 'abort') this.#engine.abortAll()
      // Requests that lose their KV cache are computed again after wake-up.
      const owned = this.#ownsPause
      if (mode === 'keep') await this.#pause(tags.includes('kv_cache') ? 'retract' : 'in_place')
      try {
        return await this.#engine.releaseMemory(tags, { keepWeights: level === 1 })
      } catch (error) {
        if (!owned && this.#ownsPause) {
          this.#ownsPause = false
          await this.#engine.resume()
        }
        throw error
      }
    })
  }

  async wake (names: readonly string[]): Promise<MemoryReport> {
    const wanted = memoryTags(names)
    return await this.#inTurn(async () => {
      const tags = this.#released.filter(tag => wanted === null || wanted.includes(tag))
      const report = tags.length === 0 ? NOTHING : await this.#engine.resumeMemory(tags)
      if (this.#ownsPause && (this.#released.length === 0 || names.includes(SCHEDULING))) {
        this.#ownsPause = false
        await this.#engine.resume()
      }
      return report
    })
  }

  /** Runs calls one after another, so each one sees the state that the previous one left. */
  async #inTurn (run: () => Promise<MemoryReport>): Promise<MemoryReport> {
    this.#underWay++
    const turn = this.#last.then(run).finally(() => {
      this.#underWay--
    })
    this.#last = turn.catch(() => {})
    return await turn
  }

  get #released (): MemoryTag[] {
    return Object.keys(this.#engine.releasedMemory) as MemoryTag[]
  }

  async #pause (mode: 'abort' | 'wait' | 'retract' | 'in_place'): Promise<void> {
    this.#ownsPause ||= this.#engine.stats.paused === null
    await this.#engine.pause(mode)
  }
}

const TAGS_IN_ORDER: readonly MemoryTag[] = ['weights', 'kv_cache', 'cuda_graph']

/** Null if no tag is named. */
function memoryTags (names: readonly string[]): MemoryTag[] | null {
  const unknown = names.find(name => !Object.hasOwn(TAGS, name) && name !== SCHEDULING)
  if (unknown !== undefined) {
    throw new RefitError(
      'INVALID_REQUEST',
      `tags: expected "weights", "kv_cache" or "scheduling", got ${JSON.stringify(unknown.slice(0, 100))}`,
      { param: 'tags' }
    )
  }
  return names.length === 0 ? null : [...new Set(names.flatMap(name => TAGS[name] ?? []))]
}
