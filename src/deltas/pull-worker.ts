import { parentPort, workerData } from 'node:worker_threads'
import { errorMessage, RefitError } from '../errors.ts'
import { native } from '../native/load-addon.ts'
import { fetchDeltas } from './delta-store.ts'
import { pullWeights } from './local-checkpoint.ts'
import { PathJail } from '../sources/disk/path-jail.ts'
import type { PullJob } from './weight-pulls.ts'

// The thread of one pull. It waits for a lock, copies a checkpoint and changes it; all of these block.

try {
  const job = workerData as PullJob
  const jail = await PathJail.of(job.roots)
  const contains = (real: string): boolean => jail.contains(real)
  parentPort!.postMessage({
    done: job.kind === 'pull'
      ? pullWeights(job.request, native(), contains)
      : fetchDeltas(job.request, native(), contains)
  })
} catch (error) {
  const { code, message, param } = error instanceof RefitError
    ? error
    : new RefitError('CHECKPOINT_PATH', errorMessage(error))
  parentPort!.postMessage({ refused: { code, message, param } })
}
