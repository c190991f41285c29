import type { WeightSource, WriteReport } from '../contract/weight-source.ts'
import { RefitError, withPrefix } from '../errors.ts'
import type { LoadedFrom } from './loaded-from.ts'
import { runUpdate } from './run-update.ts'
import type { UpdateFields, UpdateHost, UpdateOutcome } from './run-update.ts'

export interface DiskHost extends UpdateHost {
  /** Opens a checkpoint inside the allowed roots. */
  readonly openCheckpoint: (path: string) => Promise<WeightSource>
  readonly loaded: LoadedFrom
}

export interface DiskUpdate extends UpdateFields {
  /**
   * A function for a path that is known only after a check. If the check fails, the transaction of the update has
   * tensors pending. Retries then join only if `identity` is given.
   */
  readonly path: string | (() => Promise<string>)
  /** null, "auto" or "safetensors". */
  readonly loadFormat?: string | null | undefined
}

const FORMATS = [null, undefined, 'auto', 'safetensors']

/**
 * Opens, checks and writes a checkpoint, then moves the label. It must be whole, unless `allowMissing` is set or the
 * update belongs to a transaction: then a part heals the tensors that it contains.
 */
export async function updateFromDisk (
  host: DiskHost,
  { path, loadFormat = null, ...fields }: DiskUpdate
): Promise<UpdateOutcome> {
  let folder = ''
  const options = {
    ...fields,
    isWhole: true,
    identity: typeof path === 'string' ? ['disk', path, loadFormat ?? ''] : fields.identity,
    failurePrefix: 'Failed to update weights: ',
    check: (report: WriteReport) => {
      requireWeights(folder, report)
    }
  }
  return await runUpdate(host, options, async write => {
    requireFormat(loadFormat)
    folder = typeof path === 'string' ? path : await path()
    const source = await host.openCheckpoint(folder).catch((error: unknown) => {
      throw withPrefix('Failed to get weights iterator: ', error)
    })
    const report = await write(source)
    host.loaded.update(folder, loadFormat, report.transaction)
    return report
  })
}

function requireFormat (format: string | null): void {
  if (!FORMATS.includes(format)) {
    throw new RefitError(
      'UNSUPPORTED',
      `load_format: expected "auto" or "safetensors", got ${JSON.stringify(format)}`,
      { param: 'load_format' }
    )
  }
}

function requireWeights (path: string, report: WriteReport): void {
  if (report.tensors > 0) return
  throw new RefitError(
    'WEIGHTS_INCOMPLETE',
    `"${path}" contains no weight of this model (${report.ignored.length} tensors that the model does not use)`,
    { param: 'model_path' }
  )
}
