import { constants } from 'node:buffer'
import type { DeltaHost } from '../../contract/delta-host.ts'
import { errorMessage, RefitError } from '../../errors.ts'
import { POSITIONS } from '../../native/deltas.ts'
import { DTYPES } from '../../native/dtypes.ts'
import type { ElementPatch } from '../../native/deltas.ts'
import type { AnnouncedTensor, PatchSource } from '../../contract/weight-source.ts'
import { readSparsePayload } from '../../wire/trainers/sparse-payload.ts'
import type { SparseItem } from '../../wire/trainers/sparse-payload.ts'
import { zstdContentBytes } from '../../wire/trainers/zstd-frame.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import { UPLOAD } from '../upload/transport.ts'

const DIGEST = /^[0-9a-f]{32}$/

/**
 * Reads one payload: compressed, with the BLAKE2b digest (16 bytes, in hex) that its sender announced. Throws
 * TENSOR_PAYLOAD, PICKLE_*, NO_MEMORY.
 */
export async function openSparsePayload (
  host: DeltaHost,
  body: Uint8Array,
  checksum: string,
  availableBytes = process.availableMemory()
): Promise<SparseItem[]> {
  if (!DIGEST.test(checksum)) {
    throw new RefitError('INVALID_REQUEST', 'checksum: expected a BLAKE2b digest of 16 bytes, in hexadecimal', {
      param: 'checksum'
    })
  }
  const size = zstdContentBytes(body)
  // The payload stays in memory until the whole sync has arrived, and another payload may arrive meanwhile.
  if (size > Math.min(availableBytes / 4, constants.MAX_LENGTH)) {
    throw new RefitError('NO_MEMORY', `a payload holds ${size} bytes, and this host has ${availableBytes} left`)
  }
  const bytes = new Uint8Array(size)
  await host.unpack(body, Buffer.from(checksum, 'hex'), bytes).catch((error: unknown) => {
    throw (error as { code?: unknown }).code === undefined
      ? payloadError(errorMessage(error))
      : error
  })
  return readSparsePayload(bytes)
}

/**
 * The changes of several payloads as one source, relative to the weights of that epoch. Throws TENSOR_PAYLOAD for a
 * tensor with two different shapes.
 */
export function sparseSource (items: readonly SparseItem[], baseEpoch: number): PatchSource {
  const tensors = new Map<string, { announced: AnnouncedTensor, patches: ElementPatch[] }>()
  let bytes = 0
  for (const { name, dtype, shape, operation, encoding, positions, first, values } of items) {
    const patch = {
      encoding: POSITIONS[encoding],
      positions,
      first,
      values,
      dtype: DTYPES[dtype],
      xor: operation === 'xor'
    }
    bytes += positions.length + values.length
    const known = tensors.get(name)
    if (known === undefined) {
      tensors.set(name, { announced: { name, dtype, shape, source: 0, offset: 0 }, patches: [patch] })
    } else if (known.announced.shape.join() !== shape.join()) {
      throw payloadError(`it has the shapes [${known.announced.shape.join(', ')}] and [${shape.join(', ')}]`, name)
    } else known.patches.push(patch)
  }
  return {
    kind: 'patch',
    transport: UPLOAD,
    tensors: [...tensors.values()].map(({ announced }) => announced),
    patch: { tensors: new Map([...tensors].map(([name, { patches }]) => [name, patches])), bytes, baseEpoch },
    verify: async () => {},
    close: async () => {}
  }
}
