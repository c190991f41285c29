import { errorMessage, RefitError } from '../errors.ts'
import type { MemoryReport, MemoryTag } from '../contract/rollout-engine.ts'
import { MEMORY_TAGS } from '../native/addon.ts'
import type { NativeAddon } from '../native/addon.ts'
import type { Gate } from '../contract/gate.ts'
import type { Readers } from './readers.ts'
import type { ShadowSet } from './shadow-set.ts'
import type { WeightLedger } from './weight-state.ts'

/** The state that a release or a resume works on. The caller has its turn already. */
export interface MemoryContext {
  addon: NativeAddon
  core: number
  ledger: WeightLedger
  readers: Readers
  /** The second set of weights: it is released with the first, before it, and comes back with the next update. */
  shadow: ShadowSet | null
  /** A copy of the weights stays in host memory while their memory is released. */
  keepWeights: boolean
  /** Host memory that is available now; null if the weights do not lie in host memory. */
  available: { forWeights: (() => number) | null, forCopies: () => number }
  weightBytes: number
  /** False on GPUs whose memory cannot be unmapped. */
  releasable: boolean
  shut: () => Promise<Gate>
}

/** Order of release. The only step that can be refused (a copy of the weights that finds no memory) comes first. */
const RELEASE_ORDER: readonly MemoryTag[] = ['weights', 'kv_cache', 'cuda_graph']
/** Order of resumption, as in SGLang. */
const RESUME_ORDER: readonly MemoryTag[] = ['cuda_graph', 'weights', 'kv_cache']

const UNRELEASABLE = 'this GPU has no virtual memory management (GPUs of virtual machines often have none): ' +
  'its memory cannot be released while the engine lives. Nothing has changed'

export async function releaseMemory (
  context: MemoryContext,
  wanted: readonly MemoryTag[] | undefined
): Promise<MemoryReport> {
  const { ledger } = context
  if (!context.releasable) throw new RefitError('UNSUPPORTED', UNRELEASABLE)
  const tags = chosen(
    RELEASE_ORDER,
    wanted,
    tag => !ledger.isReleased(tag),
    'released already; resume it before it is released again'
  )
  const began = performance.now()
  const gate = await context.shut()
  let bytes = 0
  try {
    requireNoHolders(tags, gate.holders)
    for (const tag of tags) bytes += await release(context, tag)
  } finally {
    // The contents of the KV cache are gone, so the prefix cache must not find them.
    await gate.open(ledger.opening(tags.includes('kv_cache')))
  }
  return { tags, bytes, ms: performance.now() - began }
}

export async function resumeMemory (
  context: MemoryContext,
  wanted: readonly MemoryTag[] | undefined
): Promise<MemoryReport> {
  const { ledger } = context
  const tags = chosen(RESUME_ORDER, wanted, tag => ledger.isReleased(tag), 'not released; there is nothing to resume')
  const began = performance.now()
  const gate = await context.shut()
  let bytes = 0
  try {
    for (const tag of tags) bytes += await resume(context, tag)
  } finally {
    await gate.open(ledger.opening(tags.includes('kv_cache')))
  }
  return { tags, bytes, ms: performance.now() - began }
}

function chosen (
  all: readonly MemoryTag[],
  wanted: readonly MemoryTag[] | undefined,
  fits: (tag: MemoryTag) => boolean,
  complaint: string
): MemoryTag[] {
  const misfits = all.filter(tag => (wanted === undefined || wanted.length === 0 || wanted.includes(tag)) && !fits(tag))
  if (wanted !== undefined && wanted.length > 0) {
    if (misfits.length > 0) {
      throw new RefitError(
        'CONFLICT',
        `memory of ${misfits.join(' and ')} is ${complaint}. Nothing has changed`,
        { param: 'tags' }
      )
    }
    return all.filter(tag => wanted.includes(tag))
  }
  if (misfits.length === all.length) {
    throw new RefitError(
      'CONFLICT',
      `all memory (${all.join(', ')}) is ${complaint}. Nothing has changed`,
      { param: 'tags' }
    )
  }
  return all.filter(fits)
}

function requireNoHolders (tags: readonly MemoryTag[], holders: number): void {
  if (holders === 0 || !tags.includes('kv_cache')) return
  throw new RefitError(
    'CONFLICT',
    `generation is paused in place, and ${holders} requests need their KV cache to continue: pause with mode ` +
      '"retract" (they are computed again) or "abort" before kv_cache is released. Nothing has changed',
    { param: 'tags' }
  )
}

async function release (
  { addon, core, ledger, readers, shadow, keepWeights, available, weightBytes }: MemoryContext,
  tag: MemoryTag
): Promise<number> {
  const keep = tag === 'weights' && keepWeights
  const spare = tag === 'weights' ? await shadow?.release() ?? 0 : 0
  if (keep) {
    requireMemory(
      weightBytes,
      available.forCopies(),
      'a copy of the weights (--enable-weights-cpu-backup, or sleep at level 1). The weights in use have not changed'
    )
  }
  // No read begins from here on.
  ledger.markReleased(tag, 0)
  if (tag === 'weights') await readers.idle()
  try {
    const bytes = await addon.release(core, MEMORY_TAGS[tag], keep)
    ledger.markReleased(tag, bytes)
    return bytes + spare
  } catch (error) {
    const nothingChanged = codeOf(error) === 'NO_MEMORY'
    ledger.markResumed(tag, nothingChanged)
    // The memory may be released in part: nothing may rely on the weights then.
    if (!nothingChanged) throw error
    throw new RefitError(
      'NO_MEMORY',
      `${messageOf(error)}: a copy of ${
        megabytes(weightBytes)
      } of weights (--enable-weights-cpu-backup) does not fit into memory. The weights in use have not changed`,
      { cause: error }
    )
  }
}

async function resume (
  { addon, core, ledger, available, weightBytes }: MemoryContext,
  tag: MemoryTag
): Promise<number> {
  const bytes = ledger.released[tag]!
  // Checked before any allocation: when memory runs out, Linux kills processes instead of refusing.
  if (tag === 'weights' && available.forWeights !== null) {
    requireMemory(
      weightBytes,
      available.forWeights(),
      'the weights. They stay released; free memory and try again'
    )
  }
  try {
    ledger.markResumed(tag, await addon.resume(core, MEMORY_TAGS[tag]))
    return bytes
  } catch (error) {
    if (codeOf(error) !== 'NO_MEMORY') throw error
    throw new RefitError(
      'NO_MEMORY',
      `memory of ${tag} could not be allocated (${messageOf(error)}). It stays released; free memory and try again`,
      { cause: error }
    )
  }
}

function requireMemory (needed: number, available: number, what: string): void {
  if (needed <= available) return
  throw new RefitError(
    'NO_MEMORY',
    `${megabytes(needed)} are needed and ${megabytes(available)} are available for ${what}`
  )
}

function megabytes (bytes: number): string {
  return `${(bytes / 1e6).toFixed(1)} MB`
}

function codeOf (error: unknown): unknown {
  return (error as { code?: unknown }).code
}

function messageOf (error: unknown): string {
  return errorMessage(error)
}
