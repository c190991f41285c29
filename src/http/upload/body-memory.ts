import { getHeapStatistics } from 'node:v8'
import type { FastifyInstance, FastifyRequest } from 'fastify'
import { RefitError } from '../../errors.ts'

/** Bodies up to this length may also use the last quarter of the memory, so that large ones do not keep them out. */
const SMALL = 64 * 1024

/** The memory of one body. */
export interface BodyClaim {
  /** Throws NO_MEMORY if there is not enough for so many more bytes. */
  grow: (bytes: number) => void
  release: () => void
}

/** Memory of all bodies under way: their bytes as they come, then an estimate of what is parsed from them. */
export class BodyMemory {
  readonly #total: number
  #used = 0

  constructor (total = defaultTotal()) {
    this.#total = total
  }

  get used (): number {
    return this.#used
  }

  claim (): BodyClaim {
    let held = 0
    let released = false
    return {
      grow: bytes => {
        const most = held + bytes <= SMALL ? this.#total : this.#total * 0.75
        if (released || this.#used + bytes > most) throw noMemory(this.#used, this.#total)
        held += bytes
        this.#used += bytes
      },
      release: () => {
        released = true
        this.#used -= held
        held = 0
      }
    }
  }

  /** Claims the memory of a request's body until `spendBody`, or the end of the reply (`releaseBodies`). */
  claimFor ({ raw }: FastifyRequest): BodyClaim {
    const claim = this.claim()
    claims.set(raw, claim)
    return claim
  }
}

const claims = new WeakMap<object, BodyClaim>()

/** Releases what requests have claimed when their replies have ended or their clients have left. */
export function releaseBodies (app: FastifyInstance): void {
  app.addHook('onRequest', async (request, reply) => {
    reply.raw.once('close', () => {
      claims.get(request.raw)?.release()
    })
  })
}

/** The body has been read into a plan and is not used any more. */
export function spendBody (request: FastifyRequest): void {
  request.body = undefined
  claims.get(request.raw)?.release()
}

/** Parsed bodies are JavaScript objects, which have a limit of their own. */
export function defaultTotal (): number {
  return Math.floor(getHeapStatistics().heap_size_limit / 4)
}

function noMemory (used: number, total: number): RefitError {
  const mib = (bytes: number): number => Math.ceil(bytes / 2 ** 20)
  return new RefitError(
    'NO_MEMORY',
    `the bodies of requests under way take ${mib(used)} of ${mib(total)} MiB (--body-memory), which leaves no room ` +
      'for this one: send it again later'
  )
}
