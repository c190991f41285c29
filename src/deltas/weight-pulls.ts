import { mkdir, realpath } from 'node:fs/promises'
import { basename, dirname, isAbsolute, join, resolve } from 'node:path'
import { Worker } from 'node:worker_threads'
import { RefitError } from '../errors.ts'
import type { ErrorCode } from '../errors.ts'
import { fetchedFolder } from './delta-store.ts'
import type { Fetched, FetchRequest } from './delta-store.ts'
import type { Pulled, PullRequest } from './local-checkpoint.ts'
import { PathJail } from '../sources/disk/path-jail.ts'

// The compiled file beside this one, or the source where TypeScript is run as it is.
const WORKER = new URL(`./pull-worker${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)

/** What the thread of a pull is given. */
export type PullJob =
  & { roots: readonly string[] }
  & ({ kind: 'pull', request: PullRequest } | { kind: 'fetch', request: FetchRequest })

type Reply<T> = { done: T } | { refused: { code: ErrorCode, message: string, param?: string } }

export interface WeightPullsOptions {
  roots: readonly string[]
  /** What version 0 is: the checkpoint that the engine began with. */
  baseFolder: string
}

/** A host's checkpoint that SkyRL's deltas change, and what they begin from. */
export type DeltaHost = Pick<FetchRequest, 'localFolder' | 'baseFolder' | 'baseName' | 'isOwn'>

/** Where a version of SkyRL's is published: in a folder of its own (`uri`), which lies in that of all. */
export interface DeltaVersion {
  targetVersion: number
  syncDir: string | null
  uri: string | null
}

/** Keeps checkpoints on this host up to date with what a trainer publishes, each pull on a thread of its own. */
export class WeightPulls {
  readonly #options: WeightPullsOptions

  constructor (options: WeightPullsOptions) {
    this.#options = options
  }

  /** slime's. Both folders must lie in the roots; the local one is made. Throws CHECKPOINT_PATH, CHECKPOINT_FORMAT, CHECKPOINT_CHANGED or UNSUPPORTED. */
  async pull ({ localFolder, sourceFolder, targetVersion }: Omit<PullRequest, 'baseFolder'>): Promise<Pulled> {
    const jail = await PathJail.of(this.#options.roots)
    const baseFolder = await realpath(this.#options.baseFolder)
    const local = await this.#made(jail, localFolder)
    // Version 0 is made before anything has been published.
    const source = targetVersion === 0 ? sourceFolder : await found(jail, sourceFolder, 'source_dir')
    demandApart(local, { "the model's folder": baseFolder, source_dir: source })
    return await this.#run({
      kind: 'pull',
      request: { localFolder: local, baseFolder, sourceFolder: source, targetVersion }
    })
  }

  /** Where SkyRL's deltas will be applied. A name of the Hugging Face Hub is what the server was started with. Throws CHECKPOINT_PATH. */
  async host (localFolder: string, baseModel: string): Promise<DeltaHost> {
    const jail = await PathJail.of(this.#options.roots)
    const baseFolder = await this.#base(jail, baseModel)
    const local = await this.#made(jail, localFolder)
    const own = await realpath(this.#options.baseFolder)
    demandApart(local, { base_model_path: baseFolder, "the model's folder": own })
    return { localFolder: local, baseFolder, baseName: baseModel, isOwn: baseFolder === own }
  }

  /** SkyRL's. Throws as `pull` does, and CONFLICT where the checkpoint is ahead. */
  async fetch (host: DeltaHost, { targetVersion, syncDir, uri }: DeltaVersion): Promise<Fetched> {
    const jail = await PathJail.of(this.#options.roots)
    const folder = async (path: string | null, name: string): Promise<string | null> => {
      if (path === null) return null
      if (/^[a-z][a-z\d+.-]*:\/\//i.test(path)) {
        throw new RefitError(
          'UNSUPPORTED',
          `${name}: ${
            JSON.stringify(path)
          } is in an object store, which is not read here; publish to a folder that this host shares, inside --model-root`,
          { param: name }
        )
      }
      return await found(jail, path, name)
    }
    const targetFolder = await folder(uri, 'uri')
    const syncFolder = await folder(syncDir, 'sync_dir')
    for (const published of [syncFolder, targetFolder]) {
      if (published !== null) demandApart(host.localFolder, { 'the folder of what is published': published })
    }
    return await this.#run({ kind: 'fetch', request: { ...host, targetVersion, syncFolder, targetFolder } })
  }

  /** What is to be loaded as that version. Throws CONFLICT. */
  async fetched ({ localFolder }: DeltaHost, version: number): Promise<string> {
    return await fetchedFolder(localFolder, version)
  }

  async #base (jail: PathJail, model: string): Promise<string> {
    const own = await realpath(this.#options.baseFolder)
    const real = await realpath(resolve(model)).catch(() => null)
    if (real === own || (real === null && !isAbsolute(model))) return own
    return await found(jail, model, 'base_model_path')
  }

  /** The real path of a folder that is there after it. */
  async #made (jail: PathJail, folder: string): Promise<string> {
    const path = resolve(folder)
    try {
      const parent = await jail.resolve(dirname(path))
      await mkdir(join(parent, basename(path)), { recursive: true })
      return await jail.resolve(path)
    } catch (error) {
      throw named(error, 'local_checkpoint_dir')
    }
  }

  async #run<T> (job: { kind: 'pull', request: PullRequest } | { kind: 'fetch', request: FetchRequest }): Promise<T> {
    const worker = new Worker(WORKER, { workerData: { ...job, roots: this.#options.roots } satisfies PullJob })
    const reply = await new Promise<Reply<T>>((resolve, reject) => {
      worker.once('message', resolve)
      worker.once('error', reject)
      worker.once('exit', code => {
        reject(new RefitError('INTERNAL', `the thread of the pull has ended with ${code}`))
      })
    })
    if ('done' in reply) return reply.done
    const { code, message, param } = reply.refused
    throw new RefitError(code, message, param === undefined ? {} : { param })
  }
}

async function found (jail: PathJail, path: string, param: string): Promise<string> {
  return await jail.resolve(path).catch((error: unknown) => {
    throw named(error, param)
  })
}

/** The local folder is written to. */
function demandApart (local: string, others: Readonly<Record<string, string>>): void {
  const inside = (one: string, other: string): boolean => `${one}/`.startsWith(`${other}/`)
  for (const [name, folder] of Object.entries(others)) {
    if (inside(local, folder) || inside(folder, local)) {
      throw new RefitError(
        'CHECKPOINT_PATH',
        `local_checkpoint_dir ${local} is written to, and must lie apart from ${name}, ${folder}`,
        { param: 'local_checkpoint_dir' }
      )
    }
  }
}

function named (error: unknown, param: string): unknown {
  if (!(error instanceof RefitError)) return error
  return new RefitError(error.code, `${param}: ${error.message}`, { param, cause: error })
}
