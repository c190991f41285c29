import type { ErrorCode } from '../errors.ts'

/** Codes of the addon's errors that are error codes of refit's API as they are. */
const SAME: ReadonlySet<unknown> = new Set<ErrorCode>([
  'GROUP_TIMEOUT',
  'GROUP_BROKEN',
  'GROUP_REFUSED',
  'DEVICE_LOST',
  'NO_MEMORY'
])
/** Codes of the addon that have one code in refit's API; only the message differs. */
const REFUSALS: ReadonlySet<unknown> = new Set(['GROUP_SHARED_GPU', 'GROUP_NCCL_VERSION'])
/** The addon knows no routes and options, so the advice is added here. */
const ADVICE: Record<string, string> = {
  GROUP_SHARED_GPU:
    'NCCL takes one rank for each GPU: use /update_weights_from_tensor where trainer and engine share a GPU, ' +
    'or backend "gloo"',
  GROUP_NCCL_VERSION:
    'all ranks need the same version of NCCL: name the file that the trainer uses in --nccl-path or REFIT_NCCL',
  NO_MEMORY: 'lower --bucket-bytes or --mem-fraction, or end what else uses the memory'
}

/** The code in refit's API and the message with advice, for an error of the addon's groups. Null for other errors. */
export function fromNativeGroup (error: unknown): { code: ErrorCode, message: string } | null {
  const { code, message = String(error) } = error as { code?: unknown, message?: string }
  const known = SAME.has(code) ? code as ErrorCode : REFUSALS.has(code) ? 'GROUP_REFUSED' : null
  if (known === null) return null
  const advice = ADVICE[String(code)]
  return { code: known, message: advice === undefined ? message : `${message}; ${advice}` }
}
