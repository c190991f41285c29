import { parentPort, workerData } from 'node:worker_threads'
import { RefitError } from '../errors.ts'
import { native } from '../native.ts'
import { pullWeights } from './local-checkpoint.ts'
import type { PullRequest } from './local-checkpoint.ts'

// The thread of one pull: it waits for a lock, copies a checkpoint and changes it, which all block.

try {
  parentPort!.postMessage({ pulled: pullWeights(workerData as PullRequest, native()) })
} catch (error) {
  const { code, message, param } = error instanceof RefitError ? error : new RefitError('CHECKPOINT_PATH', error instanceof Error ? error.message : String(error))
  parentPort!.postMessage({ refused: { code, message, param } })
}
