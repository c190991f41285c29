import { mkdir, realpath } from 'node:fs/promises'
import { basename, dirname, isAbsolute, join, resolve } from 'node:path'
import { Worker } from 'node:worker_threads'
import { RefitError } from '../errors.ts'
import type { ErrorCode } from '../errors.ts'
import { fetchedFolder } from './delta-store.ts'
import type { Fetched, FetchRequest } from './delta-store.ts'
import type { Pulled, PullRequest } from './local-checkpoint.ts'
import { CallJoiner } from '../weights/call-joiner.ts'
import { outside, PathJail } from '../sources/disk/path-jail.ts'

// The compiled file beside this one, or the source if Node runs TypeScript directly.
const WORKER = new URL(`./pull-worker${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)

/** The message to the thread of a pull. */
export type PullJob = Job & { roots: readonly string[] }

type Job = { kind: 'pull', request: PullRequest } | { kind: 'fetch', request: FetchRequest }

type Reply<T> = { done: T } | { refused: { code: ErrorCode, message: string, param?: string } }

export interface WeightPullsOptions {
  roots: readonly string[]
  /** The checkpoint that is version 0: the one that the engine started with. */
  baseFolder: string
}

/** A host's checkpoint that SkyRL's deltas change, and the checkpoint they begin from. */
export type DeltaCheckpoint = Pick<FetchRequest, 'localFolder' | 'baseFolder' | 'baseName' | 'isOwn'>

/**
 * The place of a published version of SkyRL's: a folder of its own (`uri`) inside the folder of all versions
 * (`syncDir`).
 */
export interface DeltaVersion {
  targetVersion: number
  syncDir: string | null
  uri: string | null
}

/**
 * Keeps checkpoints on this host up to date with the versions that a trainer publishes. Each pull has a thread of its
 * own; a call equal to a running one gets that one's outcome.
 */
export class WeightPulls {
  readonly #options: WeightPullsOptions
  readonly #running = new CallJoiner<unknown>()

  constructor (options: WeightPullsOptions) {
    this.#options = options
  }

  /**
   * For slime. Both folders must lie in the roots; the local one is created. Throws CHECKPOINT_PATH, CHECKPOINT_FORMAT,
   * CHECKPOINT_CHANGED or UNSUPPORTED.
   */
  async pull ({ localFolder, sourceFolder, targetVersion }: Omit<PullRequest, 'baseFolder'>): Promise<Pulled> {
    const jail = await PathJail.of(this.#options.roots)
    const baseFolder = await realpath(this.#options.baseFolder)
    const local = await this.#made(jail, localFolder)
    // Version 0 can be pulled before anything has been published.
    const source = targetVersion === 0 ? sourceFolder : await found(jail, sourceFolder, 'source_dir')
    requireApart(local, { "the model's folder": baseFolder, source_dir: source })
    return await this.#run({
      kind: 'pull',
      request: { localFolder: local, baseFolder, sourceFolder: source, targetVersion }
    })
  }

  /**
   * Prepares the folder for SkyRL's deltas. A name of the Hugging Face Hub means the server's own checkpoint. Throws
   * CHECKPOINT_PATH.
   */
  async host (localFolder: string, baseModel: string): Promise<DeltaCheckpoint> {
    const jail = await PathJail.of(this.#options.roots)
    const baseFolder = await this.#base(jail, baseModel)
    const local = await this.#made(jail, localFolder)
    const own = await realpath(this.#options.baseFolder)
    requireApart(local, { base_model_path: baseFolder, "the model's folder": own })
    return { localFolder: local, baseFolder, baseName: baseModel, isOwn: baseFolder === own }
  }

  /** For SkyRL. Throws the errors of `pull`, and CONFLICT if the checkpoint is ahead. */
  async fetch (host: DeltaCheckpoint, { targetVersion, syncDir, uri }: DeltaVersion): Promise<Fetched> {
    const jail = await PathJail.of(this.#options.roots)
    const folder = async (path: string | null, name: string): Promise<string | null> => {
      if (path === null) return null
      if (/^[a-z][a-z\d+.-]*:\/\//i.test(path)) {
        throw new RefitError(
          'UNSUPPORTED',
          `${name}: ${JSON.stringify(path)} is in an object store, which refit does not read; ` +
            'publish to a folder that this host shares, inside --model-root',
          { param: name }
        )
      }
      return await found(jail, path, name)
    }
    const targetFolder = await folder(uri, 'uri')
    const syncFolder = await folder(syncDir, 'sync_dir')
    for (const published of [syncFolder, targetFolder]) {
      if (published !== null) requireApart(host.localFolder, { 'the folder of published versions': published })
    }
    return await this.#run({ kind: 'fetch', request: { ...host, targetVersion, syncFolder, targetFolder } })
  }

  /** The folder to load as that version. Throws CONFLICT. */
  async fetched ({ localFolder }: DeltaCheckpoint, version: number): Promise<string> {
    return await fetchedFolder(localFolder, version)
  }

  async #base (jail: PathJail, model: string): Promise<string> {
    const own = await realpath(this.#options.baseFolder)
    const real = await realpath(resolve(model)).catch(() => null)
    if (real === own || (real === null && !isAbsolute(model))) return own
    return await found(jail, model, 'base_model_path')
  }

  /** Creates a folder and returns its real path. */
  async #made (jail: PathJail, folder: string): Promise<string> {
    const path = resolve(folder)
    try {
      if (folder.includes('\0')) throw outside(folder)
      const parent = await jail.resolve(dirname(path))
      await mkdir(join(parent, basename(path)), { recursive: true }).catch((error: NodeJS.ErrnoException) => {
        throw new RefitError('CHECKPOINT_PATH', `${JSON.stringify(folder)} cannot be created (${error.code})`)
      })
      return await jail.resolve(path)
    } catch (error) {
      throw named(error, 'local_checkpoint_dir')
    }
  }

  async #run<T> (job: Job): Promise<T> {
    return await this.#running.join(JSON.stringify(job), async () => await this.#inThread<T>(job)) as T
  }

  async #inThread<T> (job: Job): Promise<T> {
    const worker = new Worker(WORKER, { workerData: { ...job, roots: this.#options.roots } satisfies PullJob })
    const reply = await new Promise<Reply<T>>((resolve, reject) => {
      worker.once('message', resolve)
      worker.once('error', reject)
      worker.once('exit', code => {
        reject(new RefitError('INTERNAL', `the thread of the pull ended with exit code ${code}`))
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

/** Throws CHECKPOINT_PATH if the local folder, which is written to, overlaps another one. */
function requireApart (local: string, others: Readonly<Record<string, string>>): void {
  const inside = (one: string, other: string): boolean => `${one}/`.startsWith(`${other}/`)
  for (const [name, folder] of Object.entries(others)) {
    if (inside(local, folder) || inside(folder, local)) {
      throw new RefitError(
        'CHECKPOINT_PATH',
        `local_checkpoint_dir ${local} is written to, so it must lie apart from ${name}, ${folder}`,
        { param: 'local_checkpoint_dir' }
      )
    }
  }
}

function named (error: unknown, param: string): unknown {
  if (!(error instanceof RefitError)) return error
  return new RefitError(error.code, `${param}: ${error.message}`, { param, cause: error })
}
