import { RefitError } from '../../errors.ts'
import { receiveBytes } from '../../process-groups/receive-bytes.ts'
import type { WeightGroup } from '../../process-groups/weight-group.ts'
import type { DistributedReceiver, DistributedSource } from '../../sources/distributed/distributed.ts'
import { readStateDictMetadata } from '../../wire/trainers/prime-rl-metadata.ts'

const INTEGER_BYTES = 8
/** Most state dicts of a model: one for each layer, and one more. */
const MOST_DICTS = 65_536
/** Longest metadata of one state dict. */
const MOST_BYTES = 64 << 20

/**
 * prime-rl's broadcasts (transports/weights/nccl.py): an int64 with the number of state dicts; for each of them an
 * int64 with the length of its metadata, the metadata, and one flat tensor for each dtype. Sizes are known only as they
 * come: after one that cannot be read, the next message cannot be found, and the group is abandoned.
 */
export class StateDicts {
  readonly #group: WeightGroup
  readonly #receiver: DistributedReceiver
  readonly #isBeside: boolean

  /** `isBeside`: the state dicts go to a second set of weights, while steps go on. */
  constructor (group: WeightGroup, receiver: DistributedReceiver, isBeside: boolean) {
    this.#group = group
    this.#receiver = receiver
    this.#isBeside = isBeside
  }

  async count (): Promise<number> {
    return await this.#integer('the number of state dicts', 0, MOST_DICTS)
  }

  /**
   * Opens the next state dict, whose tensors are not received yet. If it is refused, it is received and dropped before
   * the error.
   */
  async open (title: string): Promise<DistributedSource> {
    const bytes = await this.#integer(`the length of the metadata of ${title}`, 1, MOST_BYTES)
    const pickle = await receiveBytes(this.#group, bytes, `the metadata of ${title}`, this.#isBeside)
    const metadata = this.#known(() => readStateDictMetadata(pickle))
    return await this.#receiver.open({
      ...metadata,
      groupName: this.#group.spec.name,
      loadFormat: null,
      packing: 'dtype'
    })
  }

  async #integer (what: string, least: number, most: number): Promise<number> {
    const bytes = await receiveBytes(this.#group, INTEGER_BYTES, what, this.#isBeside)
    const value = new DataView(bytes.buffer, bytes.byteOffset).getBigInt64(0, true)
    return this.#known(() => {
      if (value >= least && value <= most) return Number(value)
      throw new RefitError('TENSOR_PAYLOAD', `${what}: expected ${least} to ${most}, got ${value}`)
    })
  }

  #known<T> (read: () => T): T {
    try {
      return read()
    } catch (error) {
      const { code, message } = error as RefitError
      this.#group.abandon(message)
      throw new RefitError(
        code,
        `${message}. The next broadcast cannot be read, so process group "${this.#group.spec.name}" was aborted; ` +
          'initialise it again',
        { cause: error }
      )
    }
  }
}
