import type { WriteReport } from '../../contract/weight-source.ts'
import { errorMessage, withPrefix } from '../../errors.ts'
import type { UpdatesContext } from '../../http/context.ts'
import { runTransaction } from '../../updates/run-transaction.ts'
import { BucketReceiver, Stopped, stoppedRefusal } from './bucket-receiver.ts'
import type { Peers, Slot } from './peers.ts'

export interface IpcOptions {
  flushCache: boolean
  version: string | null
  /** Id of the transaction that it belongs to; null: a new one, or the trainer's open scope. */
  transaction: string | null
  /** Longest time of the whole update. */
  deadlineMs: number
}

const FAILED = 'IPC weight update failed: '

/** One exchange with a parameter server: many buckets through the same buffers are one update. */
export async function runIpcUpdate (
  context: Pick<UpdatesContext, 'engine' | 'metrics' | 'retries' | 'tensors' | 'updates'>,
  slots: readonly Slot[],
  options: IpcOptions,
  /** Not called by a call that joins a running one; nor is `end`, which is called last. */
  { connect, end }: { connect: () => Promise<Peers>, end: () => void }
): Promise<WriteReport> {
  let peers: Peers | undefined
  let receiver: BucketReceiver | undefined
  let dismissed: Promise<void> | undefined
  return await runTransaction(context, {
    ...options,
    owner: `checkpoint-engine (${slots[0]!.endpoint})`,
    identity: ['checkpoint-engine', ...slots.map(({ endpoint }) => endpoint)],
    joinsScope: true,
    explain: (error, isOld) =>
      peers === undefined ? error : withPrefix(FAILED, stoppedRefusal(error, outcomeOf(isOld))),
    close: async () => {
      try {
        await dismissed
        await receiver?.close()
      } finally {
        peers?.close()
        end()
      }
    }
  }, async part => {
    peers = await connect()
    try {
      receiver = new BucketReceiver(context, peers, part)
      await receiver.receive()
      await part.commit()
      peers.reply()
    } catch (error) {
      // The peers get the error at once; the engine need not wait until they have stopped.
      if (!(error instanceof Stopped)) dismissed = peers.dismiss(`${FAILED}${errorMessage(error)}`)
      throw error
    }
  })
}

function outcomeOf (isOld: boolean): string {
  return isOld ? 'Nothing has changed' : 'Earlier buckets have been written'
}
