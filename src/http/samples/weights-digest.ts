import { createHash } from 'node:crypto'
import { RefitError } from '../../errors.ts'
import type { ServingEngine } from '../../contract/rollout-engine.ts'

/** Epochs whose digests are remembered. */
const REMEMBERED = 256

/**
 * Digests of all weights, by epoch. A digest costs a read of the model, so it is computed when somebody asks for it, at
 * most once for each epoch.
 */
export class WeightDigests {
  readonly #engine: Pick<ServingEngine, 'checksums' | 'epoch'>
  readonly #known = new Map<number, string>()
  #pending: { epoch: number, digest: Promise<string | null> } | null = null

  constructor (engine: Pick<ServingEngine, 'checksums' | 'epoch'>) {
    this.#engine = engine
  }

  /** Null if it was not computed yet. */
  known (epoch: number): string | null {
    return this.#known.get(epoch) ?? null
  }

  /** Null if those weights are gone, or cannot be read now. */
  async of (epoch: number): Promise<string | null> {
    const known = this.known(epoch)
    if (known !== null || epoch !== this.#engine.epoch) return known
    if (this.#pending?.epoch !== epoch) {
      const digest = this.#compute(epoch).finally(() => {
        this.#pending = null
      })
      this.#pending = { epoch, digest }
    }
    return await this.#pending.digest
  }

  async #compute (epoch: number): Promise<string | null> {
    let tensors
    try {
      ;({ tensors } = await this.#engine.checksums())
    } catch (error) {
      // Memory is released, or a remote engine has no such route.
      if (error instanceof RefitError && error.code !== 'INTERNAL') return null
      throw error
    }
    if (this.#engine.epoch !== epoch) return null
    const digest = digestOf(tensors)
    this.#known.set(epoch, digest)
    for (const oldest of this.#known.keys()) {
      if (this.#known.size <= REMEMBERED) break
      this.#known.delete(oldest)
    }
    return digest
  }
}

/** SHA-256 over the lines `name checksum`, in the order of the names' bytes. */
export function digestOf (tensors: readonly { name: string, checksum: string }[]): string {
  const lines = tensors.map(({ name, checksum }) => Buffer.from(`${name} ${checksum}\n`)).sort(Buffer.compare)
  return createHash('sha256').update(Buffer.concat(lines)).digest('hex')
}
