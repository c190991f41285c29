import { readdir, stat } from 'node:fs/promises'
import { basename, dirname, join } from 'node:path'
import { RefitError } from '../../errors.ts'
import { INDEX_NAME, parseIndexInSlices, SINGLE_NAME } from '../../wire/safetensors/index.ts'
import type { PathJail } from './path-jail.ts'
import { outside } from './path-jail.ts'
import { inSlices } from './safetensors-tensors.ts'
import { WatchedFile } from './watched-file.ts'

const SUFFIX = '.safetensors'
const SHARD = /^(.+)-(\d+)-of-(\d+)\.safetensors$/
const MAX_INDEX_BYTES = 100_000_000
const OTHERS = /\.(?:bin|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|npz)$/

/**
 * The contents of a path: the folder, its safetensors files by name, and the open index with its map if there is one.
 */
export interface CheckpointFiles {
  folder: string
  names: string[]
  index?: { file: WatchedFile, weightMap: Map<string, string> }
}

/**
 * Finds the files of a checkpoint: a folder, one .safetensors file or an index. The caller closes `index.file`. Throws
 * CHECKPOINT_PATH or CHECKPOINT_FORMAT.
 */
export async function findCheckpoint (jail: PathJail, path: string): Promise<CheckpointFiles> {
  const real = await jail.resolve(path)
  const info = await stat(real).catch(() => {
    throw outside(path)
  })
  if (info.isDirectory()) return await inFolder(jail, real, path)
  // The file's own name counts, not the name of a blob that it may link to. Its folder must be inside the roots as
  // well.
  const name = basename(path)
  const folder = await jail.resolve(dirname(path))
  if (name.endsWith(SUFFIX + '.index.json')) return await byIndex(jail, folder, name)
  if (!name.endsWith(SUFFIX)) {
    throw refuse(`${JSON.stringify(path)} is not a ${SUFFIX} file; refit reads safetensors only`)
  }
  return { folder, names: [name] }
}

async function inFolder (jail: PathJail, folder: string, path: string): Promise<CheckpointFiles> {
  const all = await readdir(folder).catch(error => {
    throw refuse(`${JSON.stringify(path)} cannot be listed (${error.code})`)
  })
  const names = all.filter(name => name.endsWith(SUFFIX) && !name.startsWith('.')).sort()
  const shards = names.filter(name => SHARD.test(name))
  if (all.includes(INDEX_NAME)) {
    const found = await byIndex(jail, folder, INDEX_NAME)
    if (!names.includes(SINGLE_NAME) || found.names.includes(SINGLE_NAME)) return found
    await found.index!.file.close()
    throw refuse(
      `${JSON.stringify(path)} holds both ${SINGLE_NAME} and an ${INDEX_NAME} of other files; remove the stale one`
    )
  }
  if (names.includes(SINGLE_NAME)) {
    if (shards.length > 0) {
      throw refuse(
        `${JSON.stringify(path)} holds both ${SINGLE_NAME} and shards (${
          shards[0]
        }), and no index; remove the stale ones`
      )
    }
    return { folder, names: [SINGLE_NAME] }
  }
  if (names.length === 0) throw refuse(nothingIn(path, all))
  checkShards(path, shards)
  return { folder, names }
}

async function byIndex (jail: PathJail, folder: string, name: string): Promise<CheckpointFiles> {
  const file = await WatchedFile.open(jail, join(folder, name), name)
  try {
    if (file.size > MAX_INDEX_BYTES) {
      throw new RefitError('CHECKPOINT_FORMAT', `${name}: ${file.size} bytes are too many (at most ${MAX_INDEX_BYTES})`)
    }
    const { weightMap, files } = await inSlices(parseIndexInSlices(await file.read(0, file.size), name))
    return { folder, names: files, index: { file, weightMap } }
  } catch (error) {
    await file.close()
    throw error
  }
}

/** Without an index, only the names of the shards show how many there must be. */
function checkShards (path: string, shards: string[]): void {
  const series = new Set(shards.map(name => name.replace(SHARD, '$1 of $3')))
  if (series.size > 1) {
    throw refuse(
      `${JSON.stringify(path)} mixes shards of different saves: ${[...series].join(', ')}; remove the stale ones`
    )
  }
  if (shards.length === 0) return
  const [, prefix, digits, total] = SHARD.exec(shards[0]!) as unknown as [string, string, string, string]
  if (Number(total) > 100_000) throw refuse(`${shards[0]} speaks of ${total} shards`)
  const have = new Set(shards.map(name => Number(SHARD.exec(name)![2])))
  for (let i = 1; i <= Number(total); i++) {
    if (!have.has(i)) {
      throw refuse(
        `${JSON.stringify(path)} lacks ${prefix}-${String(i).padStart(digits.length, '0')}-of-${total}${SUFFIX}`
      )
    }
  }
}

function nothingIn (path: string, all: string[]): string {
  const other = all.find(name => OTHERS.test(name))
  if (other === undefined) {
    return `${JSON.stringify(path)} holds no ${SUFFIX} file${all.length === 0 ? ': it is empty' : ''}`
  }
  return `${
    JSON.stringify(path)
  } holds ${other}, but no ${SUFFIX} file; refit reads safetensors only (save_pretrained writes them)`
}

function refuse (message: string): RefitError {
  return new RefitError('CHECKPOINT_PATH', message, { param: 'model_path' })
}
