import { RefitError } from '../errors.ts'
import type { KeptName, KeptTensors } from '../sources/tensor/kept-tensors.ts'
import type { TensorReceiver } from '../sources/tensor/tensor-receiver.ts'
import { runUpdate } from './run-update.ts'
import type { UpdateFields, UpdateHost, UpdateOutcome } from './run-update.ts'

export interface TensorHost extends UpdateHost {
  /** Opens the handles that trainers send. `discard` gives back the references of a refused body. */
  readonly tensors: Pick<TensorReceiver, 'open' | 'openHandle' | 'openOffer' | 'discard'>
  readonly kept: KeptTensors
}

export interface TensorUpdate extends UpdateFields {
  /** Base64 of pickled handles, one text per rank or one for all. Required unless `kept` is given. */
  readonly entries?: readonly string[] | undefined
  readonly loadFormat?: string | null | undefined
  /** The handles go to several engines, and another one gives their references back. */
  readonly borrowed?: boolean | undefined
  /** Keep the opened tensors under this name, to be written again by `kept`. */
  readonly keep?: KeptName | null | undefined
  /** Instead of `entries`: write the tensors that are kept under this name again. */
  readonly kept?: KeptName | null | undefined
}

/**
 * Opens tensors in a trainer's memory, writes them and gives the references back (unless they are kept), then returns.
 */
export async function updateFromTensors (
  host: TensorHost,
  { entries, loadFormat = null, borrowed = false, keep, kept, ...fields }: TensorUpdate
): Promise<UpdateOutcome> {
  const options = { ...fields, failurePrefix: 'Failed to update weights: ' }
  if (kept != null) {
    // Never joined: the memory may hold other bytes now than when the previous call read it.
    return await runUpdate(host, options, async write => {
      if (entries === undefined && keep == null) return await host.kept.write(kept, write)
      if (!borrowed) await host.tensors.discard(entries ?? [])
      throw new RefitError('INVALID_REQUEST', 'kept: it replaces serialized_named_tensors and keep', {
        param: 'kept'
      })
    })
  }
  // A trainer makes new handles for every request, so equal texts are a client's retry.
  const identity = ['tensor', JSON.stringify([loadFormat, keep ?? null]), ...entries ?? []]
  return await runUpdate(host, { ...options, identity }, async write => {
    if (entries === undefined) {
      throw new RefitError('INVALID_REQUEST', 'serialized_named_tensors: is required', {
        param: 'serialized_named_tensors'
      })
    }
    const began = performance.now()
    const source = await host.tensors.open({ entries, loadFormat, borrowed })
    const decode = performance.now() - began
    const report = keep == null ? await write(source) : await host.kept.keep(keep, source, write)
    return { ...report, ms: { decode, ...report.ms } }
  })
}
