import { layOutPieces } from './pieces.ts'
import type { WeightGroup } from './weight-group.ts'

/**
 * One broadcast that is no weight, in the turn of the group's requests: `bytes` of it, 1 or more. For senders that say on the wire what
 * comes next. Where the group wants the gate shut, nothing is generated until it has come. Throws what the group fails by.
 */
export async function receiveBytes (group: WeightGroup, bytes: number, of: string): Promise<Uint8Array> {
  const receipt = group.announce(layOutPieces([bytes], bytes).pieces, () => of)
  let read: Uint8Array = new Uint8Array()
  const take = async (): Promise<void> => {
    const piece = await receipt.next()
    if (piece?.source == null || !('staged' in piece.source)) {
      throw new TypeError('a group gives out what lies in a slot')
    }
    read = await group.read(piece.source.staged.slot, bytes)
    await receipt.next()
  }
  try {
    await (group.needsGate ? group.runBetweenSteps(take) : take())
    return read
  } finally {
    await receipt.close()
  }
}
