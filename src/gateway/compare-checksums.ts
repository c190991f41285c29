import { createHash } from 'node:crypto'
import { messageOf } from '../remote/connection.ts'
import type { Worker } from './worker.ts'

/** Longest wait for checksums: a busy host may have to read the weights from memory slowly. */
const CHECKSUMS_MS = 300_000

interface Checksums {
  digest: string
  tensors: ReadonlyMap<string, string>
}

/** The first tensors that differ between two engines, or what failed; null if all are equal. */
export async function differenceOfBytes (worker: Worker, peer: Worker): Promise<string | null> {
  const [own, theirs] = await Promise.all([readChecksums(worker), readChecksums(peer)])
  if (typeof own === 'string') return `its checksums could not be read: ${own}`
  if (typeof theirs === 'string') return `checksums of ${peer.url} could not be read: ${theirs}`
  if (own.digest === theirs.digest) return null
  const different = [...theirs.tensors]
    .filter(([name, checksum]) => own.tensors.get(name) !== checksum)
    .map(([name]) => name)
  const shown = different.slice(0, 3).join(', ')
  const more = different.length > 3 ? ` and ${different.length - 3} more` : ''
  return `it holds other weights than ${peer.url}${different.length === 0 ? '' : `: ${shown}${more}`}`
}

/**
 * Checksums of whole tensors if the engine reports them: they do not depend on its ranks. Else one of the engine. A
 * string is a failure.
 */
async function readChecksums ({ connection }: Worker): Promise<Checksums | string> {
  try {
    const reply = await connection.json('POST', '/weights_checker', { action: 'checksum' }, {
      admin: true,
      signal: AbortSignal.timeout(CHECKSUMS_MS)
    })
    const { checksums: tensors, per_engine_checksum: whole } = (reply.body ?? {}) as {
      checksums?: Record<string, string>
      per_engine_checksum?: string
    }
    if (reply.status >= 400) return messageOf(reply)
    if (typeof tensors === 'object' && tensors !== null) {
      const sorted = Object.entries(tensors).sort(([a], [b]) => a < b ? -1 : 1)
      return { digest: createHash('sha256').update(JSON.stringify(sorted)).digest('hex'), tensors: new Map(sorted) }
    }
    return typeof whole === 'string' ? { digest: whole, tensors: new Map() } : 'the reply names none'
  } catch (error) {
    return (error as Error).message
  }
}
