import { layOutPieces } from './pieces.ts'
import type { WeightGroup } from './weight-group.ts'

/**
 * Receives one broadcast of `bytes` (1 or more) that is no weight, in the order of the group's requests. Some senders
 * announce the following tensors in such a broadcast. If the group needs the gate shut, nothing is generated until it
 * has arrived. Throws the group's failure.
 */
export async function receiveBytes (group: WeightGroup, bytes: number, of: string): Promise<Uint8Array> {
  const stream = group.announce(layOutPieces([bytes], bytes).pieces, () => of)
  let read: Uint8Array = new Uint8Array()
  const take = async (): Promise<void> => {
    const piece = await stream.next()
    if (piece?.source == null || !('staged' in piece.source)) {
      throw new TypeError('a group stages what has no place in the weights')
    }
    read = await group.read(piece.source.staged.slot, bytes)
    await stream.next()
  }
  try {
    await (group.needsGate ? group.runBetweenSteps(take) : take())
    return read
  } finally {
    await stream.close()
  }
}
