import { cutCheckpoint, layOutCheckpoint, longestPiece, weightBytes } from '../model/checkpoint-layout.ts'
import { checksums } from '../weights/checksum.ts'
import { gatherRows } from '../weights/gather.ts'
import { readWeightsInTurn } from '../weights/exclusive-access.ts'
import type { WeightStore } from '../weights/weight-store.ts'
import { allOf } from './all-of.ts'
import { leaveLinks, meetLinks } from './remote-link.ts'
import type { Link } from './remote-link.ts'

/**
 * `parameters`: each rank sends its parameters straight into place over a link of its own. `checkpoint`: whole tensors
 * over one link.
 */
export type SendLayout = 'parameters' | 'checkpoint'

export interface SendOptions {
  layout: SendLayout
  /** The most bytes of one broadcast of tensors. */
  pieceBytes: number
  /** The limit of the wait in the queue of updates, and of each step of the transfer. */
  timeoutMs: number
}

export interface SenderOptions extends SendOptions {
  /** A barrier with the receivers before the first byte. */
  barrier: boolean
}

export interface SentWeights {
  /** Label and epoch of the sent weights. */
  version: string
  epoch: number
  bytes: number
  ms: number
  /** The checksum of every checkpoint tensor as it was sent. */
  checksums: Record<string, string>
}

/**
 * Sends all weights of an engine over joined links, queued with the updates, and ends the links. Over gloo the engine
 * generates meanwhile. NCCL spins on the GPUs, so no step runs during a transfer, and running requests continue
 * afterwards.
 */
export async function sendWeights (
  store: WeightStore,
  links: readonly Link[],
  { layout, pieceBytes, timeoutMs, barrier }: SenderOptions
): Promise<SentWeights> {
  const send = async (): Promise<number> => {
    if (barrier) await meetLinks(links, timeoutMs)
    const bytes = layout === 'parameters'
      ? await sendParameters(store, links, timeoutMs)
      : await sendTensors(store, links[0]!, pieceBytes, timeoutMs)
    await leaveLinks(links, timeoutMs)
    return bytes
  }
  return await readWeightsInTurn(store, async still => {
    const started = performance.now()
    const { epoch, weightVersion: version } = store
    const bytes = links.some(({ backend }) => backend === 'nccl') ? await still(send) : await send()
    const ms = performance.now() - started
    const { tensors } = await checksums(store)
    return {
      version,
      epoch,
      bytes,
      ms,
      checksums: Object.fromEntries(tensors.map(({ name, checksum }) => [name, checksum]))
    }
  }, timeoutMs)
}

async function sendParameters (
  { addon, core, table, ledger }: WeightStore,
  links: readonly Link[],
  timeoutMs: number
): Promise<number> {
  await allOf(
    links.map(async (link, rank) => {
      await addon.groupParams(link.handle, core, rank, 0, timeoutMs, ledger.set)
    }),
    reason => {
      // Without an abort the other links would wait for their peers until the deadline.
      for (const link of links) link.abort(reason)
    }
  )
  return weightBytes(table)
}

/** The next piece is gathered while the previous one is being sent. */
async function sendTensors (
  store: WeightStore,
  { handle, backend }: Link,
  pieceBytes: number,
  timeoutMs: number
): Promise<number> {
  const { addon, core, ledger } = store
  const from = { addon, core, access: { set: ledger.set } }
  const layout = layOutCheckpoint(store.table)
  const pieces = [...cutCheckpoint(layout, pieceBytes)]
  const most = longestPiece(pieces)
  if (backend === 'nccl') await addon.stageGroup(handle, most, 1)
  const buffers = [new Uint8Array(most), new Uint8Array(most)]
  const gather = async (index: number): Promise<Uint8Array | undefined> => {
    const piece = pieces[index]
    if (piece === undefined) return undefined
    const buffer = buffers[index % 2]!.subarray(0, piece.length)
    for (const part of piece.parts) await gatherRows(from, part, buffer)
    return buffer
  }
  let next = await gather(0)
  for (let index = 0; next !== undefined; index++) {
    const [gathered] = await allOf<unknown>([gather(index + 1), addon.groupSend(handle, next, timeoutMs)])
    next = gathered as Uint8Array | undefined
  }
  return layout.bytes
}
