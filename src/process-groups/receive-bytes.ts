import type { BroadcastStream } from './broadcast-stream.ts'
import { layOutPieces } from './pieces.ts'
import type { WeightGroup } from './weight-group.ts'

/**
 * Receives one broadcast of `bytes` (1 or more) that is no weight, in the order of the group's requests. Some senders
 * announce the following tensors in such a broadcast. If the group needs the gate shut, nothing is generated until it
 * has arrived, unless `isBeside`: on an engine with two sets of weights. Throws the group's failure.
 */
export async function receiveBytes (
  group: WeightGroup,
  bytes: number,
  of: string,
  isBeside = false
): Promise<Uint8Array> {
  const stream = group.announce(layOutPieces([bytes], bytes).pieces, () => of)
  let read: Uint8Array = new Uint8Array()
  await receiveStream(group, stream, bytes => {
    read = bytes
  }, isBeside)
  return read.subarray(0, bytes)
}

/**
 * Receives the broadcasts of a stream into host memory, with the gate shut if the group needs it and it is not
 * `isBeside`. `take`: called with the bytes of each piece and the offset of its first byte in the stream. Closes the
 * stream. Throws the group's failure.
 */
export async function receiveStream (
  group: WeightGroup,
  stream: BroadcastStream,
  take: (bytes: Uint8Array, begin: number) => void,
  isBeside = false
): Promise<void> {
  const receive = async (): Promise<void> => {
    for (;;) {
      const piece = await stream.next()
      if (piece === undefined) return
      if (piece.source === null || !('staged' in piece.source)) {
        throw new TypeError('a group stages what has no place in the weights')
      }
      take(await group.read(piece.source.staged.slot, piece.length), piece.begin)
    }
  }
  try {
    if (isBeside) stream.receiveBeside()
    // Before the gate: a stream ahead may need it.
    await stream.ready()
    await (group.needsGate && !isBeside ? group.gate.shut(receive) : receive())
  } finally {
    await stream.close()
  }
}
