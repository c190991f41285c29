import { createHash } from 'node:crypto'
import type { DeltaHost } from '../contract/delta-host.ts'
import type { AnnouncedTensor, StoredSource, WeightSource } from '../contract/weight-source.ts'
import { RefitError } from '../errors.ts'
import { bytesOf } from '../native/dtypes.ts'
import type { NativeSource } from '../native/write-job.ts'
import { readSpan } from './disk/read-span.ts'

const HASHED_BYTES = 64 << 20
const LISTED = 5

/** Throws ADAPTER_REFUSED for a tensor that is missing or is not expected. */
export function requireNames (
  { tensors }: Pick<WeightSource, 'tensors'>,
  expected: Readonly<Record<string, string>>
): void {
  const names = new Set(tensors.map(({ name }) => name))
  const missing = Object.keys(expected).filter(name => !names.has(name))
  if (missing.length > 0) throw refuse('names tensors that were not sent', missing)
  const extra = [...names].filter(name => !Object.hasOwn(expected, name))
  if (extra.length > 0) throw refuse('lacks tensors that were sent', extra)
}

/**
 * Compares the SHA-256 of every tensor's bytes with what the sender expects, by names as the source has them. Throws
 * ADAPTER_REFUSED for a tensor that differs. `host` reads memory of GPUs.
 */
export async function requireChecksums (
  source: StoredSource,
  expected: Readonly<Record<string, string>>,
  host: Pick<DeltaHost, 'fetch'> | undefined
): Promise<void> {
  await source.verify()
  for (const tensor of source.tensors) {
    const sum = await sha256(tensor, source.sources[tensor.source], host)
    if (sum === expected[tensor.name]!.toLowerCase()) continue
    throw refuse(`is ${expected[tensor.name]!.slice(0, 80)}, and the bytes have ${sum}`, [tensor.name])
  }
}

async function sha256 (
  { name, dtype, shape, offset, parts }: AnnouncedTensor,
  source: NativeSource | undefined,
  host: Pick<DeltaHost, 'fetch'> | undefined
): Promise<string> {
  if (parts !== undefined) throw refuse('of a tensor that is not contiguous cannot be checked', [name])
  const bytes = shape.reduce((product, size) => product * size, bytesOf(dtype))
  const hash = createHash('sha256')
  for (let at = 0; at < bytes; at += HASHED_BYTES) {
    hash.update(await read(name, source, offset + at, Math.min(HASHED_BYTES, bytes - at), host))
  }
  return hash.digest('hex')
}

async function read (
  name: string,
  source: NativeSource | undefined,
  at: number,
  length: number,
  host: Pick<DeltaHost, 'fetch'> | undefined
): Promise<Uint8Array> {
  if (source !== undefined && 'fd' in source) return await readSpan(source.fd, at, length, name)
  if (source !== undefined && 'buffer' in source) return source.buffer.subarray(at, at + length)
  if (source !== undefined && 'segment' in source && host !== undefined) return await host.fetch(source, at, length)
  throw refuse('cannot be checked: this engine does not read the memory of', [name])
}

function refuse (why: string, names: readonly string[]): RefitError {
  const listed = names.slice(0, LISTED).map(name => JSON.stringify(name.slice(0, 200))).join(', ')
  const more = names.length > LISTED ? ` and ${names.length - LISTED} more` : ''
  return new RefitError('ADAPTER_REFUSED', `expected_checksums ${why}: ${listed}${more}. Nothing has changed`, {
    param: 'expected_checksums'
  })
}
