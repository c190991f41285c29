import { RefitError } from '../../errors.ts'
import { receiveBytes } from '../../process-groups/receive-bytes.ts'
import type { WeightGroup } from '../../process-groups/weight-group.ts'
import type { DistributedReceiver, DistributedSource } from '../../sources/distributed/distributed.ts'
import { readStateDictMetadata } from '../../wire/trainers/prime-rl-metadata.ts'

const INTEGER_BYTES = 8
/** Of a model: its layers and one more. */
const MOST_DICTS = 65_536
/** Of the metadata of one state dict. */
const MOST_BYTES = 64 << 20

/**
 * What prime-rl broadcasts (transports/weights/nccl.py): an int64, how many state dicts come; of each an int64, how long its metadata is,
 * the metadata, and all of its tensors of one dtype as one flat tensor. So sizes are learned as it comes; where one is none, nobody can
 * tell what comes next, and the group is given up.
 */
export class StateDicts {
  readonly #group: WeightGroup
  readonly #receiver: DistributedReceiver

  constructor (group: WeightGroup, receiver: DistributedReceiver) {
    this.#group = group
    this.#receiver = receiver
  }

  async count (): Promise<number> {
    return await this.#integer('how many state dicts come', 0, MOST_DICTS)
  }

  /** Announced, not received yet; throws what is wrong with it after it has been received and dropped. */
  async open (title: string): Promise<DistributedSource> {
    const bytes = await this.#integer(`the length of the metadata of ${title}`, 1, MOST_BYTES)
    const pickle = await receiveBytes(this.#group, bytes, `the metadata of ${title}`)
    const metadata = this.#known(() => readStateDictMetadata(pickle))
    return await this.#receiver.open({
      ...metadata,
      groupName: this.#group.spec.name,
      loadFormat: null,
      packing: 'dtype'
    })
  }

  async #integer (what: string, least: number, most: number): Promise<number> {
    const bytes = await receiveBytes(this.#group, INTEGER_BYTES, what)
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
        `${message}. Nobody can tell what the trainer sends, so that process group "${this.#group.spec.name}" was aborted; initialise it again`,
        { cause: error }
      )
    }
  }
}
