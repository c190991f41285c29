import { readdir, stat } from 'node:fs/promises'
import { join, resolve } from 'node:path'
import type { StoredSource } from '../../contract/weight-source.ts'
import { RefitError } from '../../errors.ts'
import { ADAPTER_CONFIG, ADAPTER_WEIGHTS } from '../../wire/adapter-form.ts'
import { openDiskSource } from './disk.ts'
import type { DiskOptions } from './disk.ts'
import { outside, PathJail } from './path-jail.ts'
import { WatchedFile } from './watched-file.ts'

const PICKLED = 'adapter_model.bin'
/** Thousands of patterns fit; PEFT writes some 2 KB. */
const MAX_CONFIG_BYTES = 4 << 20

export interface AdapterFolder {
  /** The content of adapter_config.json. */
  config: unknown
  source: StoredSource
}

/** True if the path is a folder inside the roots that holds an adapter_config.json. */
export async function isAdapterFolder (path: string, { roots }: DiskOptions): Promise<boolean> {
  const jail = await PathJail.of(roots)
  return await jail.resolve(join(path, ADAPTER_CONFIG)).then(() => true, () => false)
}

/**
 * An adapter in a folder as PEFT saves it. Both files are checked again before and after the write, because a trainer
 * may replace them. Throws CHECKPOINT_PATH, CHECKPOINT_FORMAT or CHECKPOINT_CHANGED; then nothing stays open.
 */
export async function openAdapterFolder (path: string, options: DiskOptions): Promise<AdapterFolder> {
  const jail = await PathJail.of(options.roots)
  const folder = await jail.resolve(path)
  const names = await listed(folder, path)
  if (!names.includes(ADAPTER_CONFIG)) throw refuse(path, `holds no ${ADAPTER_CONFIG}`)
  if (!names.includes(ADAPTER_WEIGHTS)) {
    const why = names.includes(PICKLED)
      ? `holds ${PICKLED}, a pickle, which refit does not read: save it with safe_serialization=True`
      : `holds no ${ADAPTER_WEIGHTS}`
    throw refuse(path, why)
  }
  const file = await WatchedFile.open(jail, join(folder, ADAPTER_CONFIG), ADAPTER_CONFIG)
  try {
    const config = await readConfig(file)
    const weights = await openDiskSource(join(folder, ADAPTER_WEIGHTS), options)
    return { config, source: withConfig(weights, file, resolve(path)) }
  } catch (error) {
    await file.close()
    throw error
  }
}

async function listed (folder: string, path: string): Promise<string[]> {
  const info = await stat(folder).catch(() => {
    throw outside(path)
  })
  if (!info.isDirectory()) throw refuse(path, `is a file; name the folder that holds it and its ${ADAPTER_CONFIG}`)
  return await readdir(folder).catch(error => {
    throw refuse(path, `cannot be listed (${error.code})`)
  })
}

async function readConfig (file: WatchedFile): Promise<unknown> {
  if (file.size > MAX_CONFIG_BYTES) {
    throw new RefitError(
      'CHECKPOINT_FORMAT',
      `${file.label}: ${file.size} bytes are too many (at most ${MAX_CONFIG_BYTES})`
    )
  }
  const text = String(await file.read(0, file.size))
  try {
    return JSON.parse(text) as unknown
  } catch (error) {
    throw new RefitError('CHECKPOINT_FORMAT', `${file.label} is no JSON: ${(error as Error).message.slice(0, 200)}`)
  }
}

function withConfig (weights: StoredSource, config: WatchedFile, path: string): StoredSource {
  return {
    kind: 'stored',
    transport: weights.transport,
    tensors: weights.tensors,
    sources: weights.sources,
    path,
    verify: async () => {
      await config.verify()
      await weights.verify()
    },
    close: async () => {
      await Promise.all([config.close(), weights.close()])
    }
  }
}

function refuse (path: string, why: string): RefitError {
  return new RefitError('CHECKPOINT_PATH', `${JSON.stringify(path)} ${why}`, { param: 'lora_path' })
}
