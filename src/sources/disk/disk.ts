import { join, resolve } from 'node:path'
import { RefitError } from '../../errors.ts'
import {
  formatError,
  headerLength,
  MAX_HEADER_BYTES,
  MAX_TENSORS,
  PREFIX_BYTES
} from '../../wire/safetensors/header.ts'
import { MAX_FILES } from '../../wire/safetensors/index.ts'
import type { AnnouncedTensor, StoredSource, Transport } from '../../contract/weight-source.ts'
import { findCheckpoint } from './checkpoint-files.ts'
import { KnownHeaders } from './known-headers.ts'
import type { Header, HeaderTensors } from './known-headers.ts'
import { PathJail } from './path-jail.ts'
import { announce, checkIndex, parseTensors } from './safetensors-tensors.ts'
import { WatchedFile } from './watched-file.ts'

const DISK: Transport = { name: 'disk', readError: 'CHECKPOINT_FORMAT' }

export interface DiskOptions {
  /** Folders in which checkpoints may lie. Symlinks are followed. */
  roots: readonly string[]
  /** Spares the parsing of headers that it has (default: none). */
  known?: KnownHeaders
}

/**
 * A checkpoint on disk: a folder, a .safetensors file or an index. Opens every file and checks every header; changes
 * nothing. Throws CHECKPOINT_PATH, CHECKPOINT_FORMAT or CHECKPOINT_CHANGED; then nothing stays open.
 */
export async function openDiskSource (path: string, { roots, known }: DiskOptions): Promise<StoredSource> {
  const jail = await PathJail.of(roots)
  const { folder, names, index } = await findCheckpoint(jail, path)
  const watched = index === undefined ? [] : [index.file]
  const closeAll = async (): Promise<void> => {
    await Promise.all(watched.map(async file => {
      await file.close()
    }))
  }
  try {
    if (names.length > MAX_FILES) {
      throw new RefitError(
        'CHECKPOINT_FORMAT',
        `${names.length} files are too many for one checkpoint (at most ${MAX_FILES})`
      )
    }
    const files: WatchedFile[] = []
    for (const name of names) {
      const file = await WatchedFile.open(jail, join(folder, name), name)
      watched.push(file)
      files.push(file)
    }
    const { tensors, owners } = await readTensors(files, known ?? new KnownHeaders())
    if (index !== undefined) {
      checkIndex(
        { label: index.file.label, weightMap: index.weightMap },
        name => names[owners.get(name) ?? -1]
      )
    }
    return new DiskSource(resolve(path), tensors, files, watched)
  } catch (error) {
    await closeAll()
    throw error
  }
}

class DiskSource implements StoredSource {
  readonly kind = 'stored'
  readonly transport = DISK
  readonly path: string
  readonly tensors: readonly AnnouncedTensor[]
  readonly sources: ReadonlyArray<{ fd: number }>
  readonly #watched: readonly WatchedFile[]
  #closing: Promise<void> | undefined

  constructor (
    path: string,
    tensors: readonly AnnouncedTensor[],
    files: readonly WatchedFile[],
    watched: readonly WatchedFile[]
  ) {
    this.path = path
    this.tensors = tensors
    this.sources = files.map(({ fd }) => ({ fd }))
    this.#watched = watched
  }

  async verify (): Promise<void> {
    for (const file of this.#watched) await file.verify()
  }

  async close (): Promise<void> {
    this.#closing ??= Promise
      .all(this.#watched.map(async file => {
        await file.close()
      }))
      .then(() => {})
    await this.#closing
  }
}

/** Reads the headers of all files. Tensors come by file and offset, so that reads run forward. */
async function readTensors (files: readonly WatchedFile[], known: KnownHeaders): Promise<HeaderTensors> {
  const headers = await readHeaders(files)
  const found = known.find(headers)
  if (found !== undefined) return found
  const tensors: AnnouncedTensor[] = []
  const owners = new Map<string, number>()
  for (const [source, { json, fileBytes }] of headers.entries()) {
    const { label } = files[source]!
    for (const tensor of await parseTensors(json, fileBytes, label)) {
      const owner = owners.get(tensor.name)
      if (owner !== undefined) throw formatError(label, `is in ${files[owner]!.label} as well`, tensor.name)
      owners.set(tensor.name, source)
      tensors.push(announce(tensor, source, label))
    }
    if (tensors.length > MAX_TENSORS) {
      throw formatError(label, `with it this checkpoint has more than ${MAX_TENSORS} tensors`)
    }
  }
  known.keep(headers, { tensors, owners })
  return { tensors, owners }
}

async function readHeaders (files: readonly WatchedFile[]): Promise<Header[]> {
  const headers: Header[] = []
  let budget = MAX_HEADER_BYTES
  for (const file of files) {
    const length = headerLength(await file.read(0, Math.min(PREFIX_BYTES, file.size)), file.size, file.label)
    budget -= length
    if (budget < 0) {
      throw formatError(file.label, `with it the headers of this checkpoint pass ${MAX_HEADER_BYTES} bytes`)
    }
    headers.push({ json: await file.read(PREFIX_BYTES, length), fileBytes: file.size })
  }
  return headers
}
