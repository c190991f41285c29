import { createHash } from 'node:crypto'
import { RefitError } from '../errors.ts'
import type { DataParallel, RolloutEngine, TensorChecksum } from '../contract/rollout-engine.ts'

const SHOWN = 50
const ALONE: DataParallel = { rank: 0, size: 1 }

/**
 * SGLang's weight checker, built on the engine's checksums: a snapshot stores the checksums, a reset fills all weights
 * with noise.
 */
export class WeightsChecker {
  readonly #engine: RolloutEngine
  #snapshot: Map<string, string> | null = null

  constructor (engine: RolloutEngine) {
    this.#engine = engine
  }

  async checksum (): Promise<Record<string, unknown>> {
    const { tensors, ranks } = await this.#engine.checksums()
    const reports = ranks.map((rank, i) => rankReport(rank, i, ranks.length, this.#engine.info.dataParallel))
    return {
      success: true,
      message: 'Success.',
      ranks: reports,
      per_engine_checksum: sha256(reports.map(report => report.per_gpu_checksum).join('')),
      checksums: asObject(tensors)
    }
  }

  async snapshot (): Promise<void> {
    this.#snapshot = await this.#now()
  }

  /** Throws unless the weights equal the snapshot. */
  async compare (): Promise<void> {
    if (this.#snapshot === null) {
      throw new RefitError('CONFLICT', 'there is no snapshot to compare with; call with action "snapshot" first')
    }
    const now = await this.#now()
    const different = [...this.#snapshot].filter(([name, checksum]) => now.get(name) !== checksum).map(([name]) => name)
    if (different.length === 0) return
    const more = different.length > SHOWN ? `\nand ${different.length - SHOWN} more` : ''
    throw new RefitError(
      'WEIGHTS_MISMATCH',
      `check tensor equality failed:\n${different.slice(0, SHOWN).join('\n')}${more}`
    )
  }

  async #now (): Promise<Map<string, string>> {
    const { tensors } = await this.#engine.checksums()
    return new Map(tensors.map(({ name, checksum }) => [name, checksum]))
  }
}

function rankReport (tensors: TensorChecksum[], rank: number, size: number, place: DataParallel = ALONE) {
  const sorted = tensors.map(({ name, checksum }) => name + checksum).sort()
  return {
    checksums: asObject(tensors),
    per_gpu_checksum: sha256(sorted.join('')),
    parallelism_info: {
      tp_rank: rank,
      tp_size: size,
      dp_rank: place.rank,
      dp_size: place.size,
      pp_rank: 0,
      pp_size: 1,
      rank,
      size
    }
  }
}

function asObject (tensors: TensorChecksum[]): Record<string, string> {
  return Object.fromEntries(tensors.map(({ name, checksum }) => [name, checksum]))
}

function sha256 (text: string): string {
  return createHash('sha256').update(text).digest('hex')
}
