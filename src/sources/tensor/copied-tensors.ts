import type { AnnouncedTensor, StoredSource } from '../../contract/weight-source.ts'
import { RefitError } from '../../errors.ts'
import { bytesOf } from '../../native/dtypes.ts'
import type { NativeSource } from '../../native/write-job.ts'
import { CHUNK_BYTES, readSource } from './read-source.ts'
import type { ReadOptions } from './read-source.ts'

/** The bytes of a source that its tensors lie in. */
interface Span {
  begin: number
  end: number
}

/**
 * Copies tensors of a source into host memory, so that their sender may overwrite its own. The source stays open.
 * Throws TENSOR_PAYLOAD or NO_MEMORY.
 */
export async function copyTensors (
  source: StoredSource,
  tensors: readonly AnnouncedTensor[],
  fetch: ReadOptions['fetch']
): Promise<StoredSource> {
  await source.verify()
  const spans = new Map<number, Span>()
  for (const tensor of tensors) {
    const { begin, end } = spanOf(tensor)
    const known = spans.get(tensor.source) ?? { begin, end }
    spans.set(tensor.source, { begin: Math.min(known.begin, begin), end: Math.max(known.end, end) })
  }
  const places = new Map<number, { source: number, begin: number }>()
  const copies: NativeSource[] = []
  for (const [index, span] of spans) {
    places.set(index, { source: copies.length, begin: span.begin })
    copies.push({ buffer: await readSpanOf(source.sources[index], span, { name: tensors[0]!.name, fetch }) })
  }
  await source.verify()
  return {
    kind: 'stored',
    transport: source.transport,
    tensors: tensors.map(tensor => {
      const { source, begin } = places.get(tensor.source)!
      const { parts } = tensor
      return {
        ...tensor,
        source,
        offset: tensor.offset - begin,
        ...parts === undefined ? {} : { parts: parts.map(part => ({ ...part, offset: part.offset - begin })) }
      }
    }),
    sources: copies,
    verify: async () => {},
    close: async () => {}
  }
}

function spanOf ({ dtype, shape, offset, parts }: AnnouncedTensor): Span {
  const size = bytesOf(dtype)
  if (parts === undefined) {
    return { begin: offset, end: offset + shape.reduce((count, length) => count * length, size) }
  }
  let [begin, end] = [offset, offset]
  for (const part of parts) {
    begin = Math.min(begin, part.offset)
    end = Math.max(end, part.offset + (part.rows - 1) * part.rowBytes + (part.cols - 1) * part.colBytes + size)
  }
  return { begin, end }
}

async function readSpanOf (
  source: NativeSource | undefined,
  { begin, end }: Span,
  options: ReadOptions
): Promise<Uint8Array> {
  let whole: Uint8Array
  try {
    whole = new Uint8Array(end - begin)
  } catch {
    throw new RefitError('NO_MEMORY', `no host memory for ${end - begin} bytes of tensors that wait for others`)
  }
  for (let at = begin; at < end; at += CHUNK_BYTES) {
    whole.set(await readSource(source!, at, Math.min(CHUNK_BYTES, end - at), options), at - begin)
  }
  return whole
}
