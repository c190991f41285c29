import type { MemoryReport, MemoryTag, RolloutEngine } from '../../contract/rollout-engine.ts'
import { RefitError } from '../../errors.ts'

export type VllmMode = 'abort' | 'wait' | 'keep'

export interface SleepRequest {
  /** 0: only pause; 1: weights come back as they were; 2: they come back empty, to be written by an update. */
  level: number
  mode: VllmMode
  /** Kinds of memory; all of them where none is named. */
  tags: readonly string[]
}

/** What goes with vLLM's tags. Recorded graphs are a part of what it calls the cache. */
const TAGS: Readonly<Record<string, readonly MemoryTag[]>> = {
  weights: ['weights'],
  kv_cache: ['kv_cache', 'cuda_graph'],
  cuda_graph: ['cuda_graph']
}
/** Not memory: a pause alone. */
const SCHEDULING = 'scheduling'
const NOTHING: MemoryReport = { tags: [], bytes: 0, ms: 0 }

/**
 * vLLM's sleep and wake over the engine's memory. A call that finds everything as it wants it does nothing and succeeds, so that a retry is
 * none the worse for it. A pause that a sleep began ends when all is awake; one that the trainer asked for stays.
 */
export class VllmSleep {
  readonly #engine: RolloutEngine
  #ownsPause = false
  /** The last call's end, and how many have not ended. */
  #last: Promise<unknown> = Promise.resolve()
  #underWay = 0

  constructor (engine: RolloutEngine) {
    this.#engine = engine
  }

  get isSleeping (): boolean {
    return this.#released.length > 0 || this.#ownsPause
  }

  /** The trainer has paused, or goes on: whatever sleep paused is its own now. */
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
    // A sleep before this one may be waiting for them.
    if (mode === 'abort' && this.#underWay > 0 && missing().length > 0) this.#engine.abortAll()
    return await this.#inTurn(async () => {
      const tags = missing()
      if (tags.length === 0) return NOTHING
      // With `wait`, a release waits for running requests by itself.
      if (mode === 'abort') this.#engine.abortAll()
      // Without their KV, requests are computed again when all is awake.
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

  /** What a call finds is what the one before left, and not what that one is about to change. */
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

/** Null where none is named. */
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
