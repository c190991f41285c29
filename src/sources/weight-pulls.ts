import { mkdir, realpath } from 'node:fs/promises'
import { basename, dirname, join, resolve } from 'node:path'
import { Worker } from 'node:worker_threads'
import { RefitError } from '../errors.ts'
import type { ErrorCode } from '../errors.ts'
import type { Pulled, PullRequest } from './local-checkpoint.ts'
import { PathJail } from './path-jail.ts'

// The compiled file beside this one, or the source where TypeScript is run as it is.
const WORKER = new URL(`./pull-worker${import.meta.url.endsWith('.ts') ? '.ts' : '.js'}`, import.meta.url)

type Reply = { pulled: Pulled } | { refused: { code: ErrorCode, message: string, param?: string } }

export interface WeightPullsOptions {
  roots: readonly string[]
  /** What version 0 is: the checkpoint that the engine began with. */
  baseFolder: string
}

/** Keeps checkpoints on this host up to date with what a trainer publishes, each pull on a thread of its own. */
export class WeightPulls {
  readonly #options: WeightPullsOptions

  constructor (options: WeightPullsOptions) { this.#options = options }

  /** Both folders must lie in the roots; the local one is made. Throws CHECKPOINT_PATH, CHECKPOINT_FORMAT, CHECKPOINT_CHANGED or UNSUPPORTED. */
  async pull ({ localFolder, sourceFolder, targetVersion }: Omit<PullRequest, 'baseFolder'>): Promise<Pulled> {
    const jail = await PathJail.of(this.#options.roots)
    const baseFolder = await realpath(this.#options.baseFolder)
    const local = await this.#made(jail, localFolder)
    // Version 0 is made before anything has been published.
    const source = targetVersion === 0 ? sourceFolder : await jail.resolve(sourceFolder).catch(error => { throw named(error, 'source_dir') })
    const inside = (one: string, other: string): boolean => `${one}/`.startsWith(`${other}/`)
    if (inside(baseFolder, local) || inside(local, baseFolder) || inside(local, source) || inside(source, local)) {
      throw new RefitError('CHECKPOINT_PATH', `local_checkpoint_dir ${local} is written to, and must lie apart from the model's folder and from source_dir`, { param: 'local_checkpoint_dir' })
    }
    return await run({ localFolder: local, baseFolder, sourceFolder: source, targetVersion })
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
}

function named (error: unknown, param: string): unknown {
  if (!(error instanceof RefitError)) return error
  return new RefitError(error.code, `${param}: ${error.message}`, { param, cause: error })
}

async function run (request: PullRequest): Promise<Pulled> {
  const worker = new Worker(WORKER, { workerData: request })
  const reply = await new Promise<Reply>((resolve, reject) => {
    worker.once('message', resolve)
    worker.once('error', reject)
    worker.once('exit', code => { reject(new RefitError('INTERNAL', `the thread of the pull has ended with ${code}`)) })
  })
  if ('pulled' in reply) return reply.pulled
  const { code, message, param } = reply.refused
  throw new RefitError(code, message, param === undefined ? {} : { param })
}
