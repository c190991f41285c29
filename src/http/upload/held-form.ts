import type { ServerResponse } from 'node:http'
import type { Adapters } from '../../contract/adapters.ts'
import { RefitError } from '../../errors.ts'
import { heldAdapterForm } from '../../sources/upload/held-adapter-form.ts'

/**
 * A loaded adapter as the form that uploads it. The adapter is held in its slot until `response` has ended. Throws
 * ADAPTER_UNKNOWN.
 */
export async function heldForm (
  adapters: Adapters,
  name: string,
  response: ServerResponse
): Promise<ReturnType<typeof heldAdapterForm>> {
  if (adapters.open === undefined) {
    throw new RefitError('UNSUPPORTED', 'adapters of a remote engine are read from that engine itself')
  }
  const gone = new AbortController()
  response.once('close', () => {
    gone.abort(new RefitError('CONFLICT', 'the client has disconnected'))
  })
  const held = await adapters.open(name, gone.signal)
  if (response.destroyed) held.close()
  else response.once('close', held.close)
  return heldAdapterForm(held)
}
