import type { AdapterInfo, AdapterReport, Adapters, UnloadMode } from '../contract/adapters.ts'
import type { DeltaHost } from '../contract/delta-host.ts'
import type { RolloutEngine } from '../contract/rollout-engine.ts'
import type { WeightSource } from '../contract/weight-source.ts'
import { RefitError, withPrefix } from '../errors.ts'
import { requireChecksums, requireNames } from '../sources/adapter-checksums.ts'
import type { AdapterFolder } from '../sources/disk/adapter-folder.ts'
import type { DistributedReceiver } from '../sources/distributed/distributed.ts'
import type { KeptName, KeptTensors } from '../sources/tensor/kept-tensors.ts'
import type { TensorReceiver } from '../sources/tensor/tensor-receiver.ts'
import type { CallJoiner } from '../weights/call-joiner.ts'
import { GROUP_NAME } from './distributed-update.ts'
import type { UpdateLog } from './update-log.ts'
import type { UpdateRecord } from './update-record.ts'

/** Counts the outcomes of loads. */
export interface AdapterMetrics {
  observeAdapter: (report: AdapterReport) => void
  observeFailedAdapter: () => void
}

export interface AdapterHost {
  readonly engine: Pick<RolloutEngine, 'adapters' | 'deltaHost'>
  readonly metrics: AdapterMetrics
  readonly updates: UpdateLog
  /** Opens an adapter inside the allowed roots. */
  readonly openAdapter: (path: string) => Promise<AdapterFolder>
  readonly tensors: Pick<TensorReceiver, 'openAdapter' | 'discard'>
  readonly kept: KeptTensors
  readonly distributed: Pick<DistributedReceiver, 'open' | 'receive' | 'refuse'>
  /** Loads under way, so that a client's retry joins the load that it repeats. */
  readonly adapterRetries: CallJoiner<AdapterReport>
}

export interface AdapterFields {
  readonly name: string
  /** The new version takes a name that is loaded already (default), or CONFLICT. */
  readonly existing?: 'replace' | 'refuse' | undefined
  /** Keeps it in its slot (default false). */
  readonly pinned?: boolean | undefined
}

export interface DiskAdapter extends AdapterFields {
  readonly path: string
}

export interface TensorAdapter extends AdapterFields {
  /** The content of adapter_config.json. */
  readonly config: unknown
  /** Base64 of pickled handles, one text per rank or one for all, each with the whole adapter; empty with `kept`. */
  readonly entries: readonly string[]
  /** Keep the opened tensors under this name, to be loaded again by `kept`. */
  readonly keep?: KeptName | null | undefined
  /** Instead of `entries`: load the tensors that are kept under this name again. */
  readonly kept?: KeptName | null | undefined
  readonly loadFormat?: string | null | undefined
  /** SHA-256 of the bytes of every tensor, as hex digits by name. */
  readonly checksums?: Readonly<Record<string, string>> | null | undefined
  /** The handles go to several engines, and another one gives their references back. */
  readonly borrowed?: boolean | undefined
}

export interface GroupAdapter extends AdapterFields {
  readonly config: unknown
  readonly names: readonly string[]
  readonly dtypes: readonly string[]
  readonly shapes: ReadonlyArray<readonly number[]>
  /** Default GROUP_NAME. */
  readonly groupName?: string | undefined
  readonly loadFormat?: string | null | undefined
  /** As TensorAdapter.checksums. */
  readonly checksums?: Readonly<Record<string, string>> | null | undefined
}

/** SGLang's path of adapters that came as tensors. */
export const FROM_TENSORS = '__tensor__'
const FROM_UPLOAD = '__upload__'
const MAX_NAME = 256
/** Characters of a name in messages. */
const MAX_SHOWN = 128
// No control characters: names go into logs, headers of metrics and paths of routes.
const NAME = /^[^\p{Cc}]+$/u

/** The adapters of an engine. Throws UNSUPPORTED if it takes none. */
export function requireAdapters ({ adapters }: Pick<RolloutEngine, 'adapters'>): Adapters {
  if (adapters !== undefined) return adapters
  throw new RefitError(
    'UNSUPPORTED',
    'LoRA is not enabled: start the server with --enable-lora (docs/adapters.md), or merge the adapter into the ' +
      'weights (merge_and_unload) and send those',
    { param: 'lora_name' }
  )
}

/** Loads an adapter that PEFT has saved in a folder. Throws CHECKPOINT_PATH if the folder is not there. */
export async function loadAdapterFromDisk (
  host: Pick<AdapterHost, 'adapterRetries' | 'engine' | 'metrics' | 'openAdapter' | 'updates'>,
  { path, ...fields }: DiskAdapter
): Promise<AdapterReport> {
  return await host.adapterRetries.join(
    ['disk', path, JSON.stringify(fields)],
    async () => await load(host, fields, path, async write => await write(await host.openAdapter(path)))
  )
}

/**
 * Loads an adapter from a trainer's memory. The references are given back before it returns, whatever happens, unless
 * the tensors are kept.
 */
export async function loadAdapterFromTensors (host: AdapterHost, adapter: TensorAdapter): Promise<AdapterReport> {
  const { entries, loadFormat = null, config, checksums, borrowed = false, keep, kept, ...fields } = adapter
  try {
    checkLoad(host.engine, fields)
    if (kept != null && (entries.length > 0 || keep != null)) {
      throw new RefitError('INVALID_REQUEST', 'kept: it replaces the handles and keep', { param: 'kept' })
    }
  } catch (error) {
    if (!borrowed) await host.tensors.discard(entries)
    host.metrics.observeFailedAdapter()
    throw ofAdapter(fields.name, error)
  }
  return await load(host, fields, FROM_TENSORS, async write => {
    const writeIt = async (source: WeightSource): Promise<AdapterReport> =>
      await write({ config, source, ...checksums == null ? {} : { checksums } })
    if (kept != null) return await host.kept.write(kept, writeIt)
    const source = await host.tensors.openAdapter({ entries, loadFormat, borrowed })
    return keep == null ? await writeIt(source) : await host.kept.keep(keep, source, writeIt)
  })
}

/**
 * Loads an adapter that a trainer broadcasts through a process group. The tensors of a refused request are received and
 * dropped first.
 */
export async function loadAdapterFromGroup (host: AdapterHost, adapter: GroupAdapter): Promise<AdapterReport> {
  return await host.adapterRetries.join(
    ['group', JSON.stringify(adapter)],
    async () => await receive(host, adapter)
  )
}

async function receive (
  host: AdapterHost,
  { config, names, dtypes, shapes, groupName = GROUP_NAME, loadFormat = null, checksums, ...fields }: GroupAdapter
): Promise<AdapterReport> {
  const request = { names, dtypes, shapes, groupName, loadFormat }
  try {
    checkLoad(host.engine, fields)
  } catch (error) {
    host.metrics.observeFailedAdapter()
    throw withNote(
      ofAdapter(fields.name, error),
      await host.distributed.refuse({ ...request, group_name: groupName }, groupName)
    )
  }
  return await load(
    host,
    fields,
    FROM_TENSORS,
    async write =>
      await write({
        config,
        source: await host.distributed.open(request),
        ...checksums == null ? {} : { checksums }
      })
  )
}

/**
 * Loads an adapter whose tensors a source has. `open` is called after the checks that need no tensors. `path`: for
 * replies.
 */
export async function loadAdapterFromSource (
  host: Pick<AdapterHost, 'engine' | 'metrics' | 'updates'>,
  fields: AdapterFields,
  { config, open, path = FROM_UPLOAD }: { config: unknown, open: () => Promise<WeightSource>, path?: string }
): Promise<AdapterReport> {
  return await load(host, fields, path, async write => await write({ config, source: await open() }))
}

/** The same error with a sentence about the bytes of its request, if there is one. */
export function withNote (error: unknown, note: string | undefined): unknown {
  if (note === undefined || !(error instanceof RefitError)) return error
  return new RefitError(error.code, `${error.message}. ${note}`, {
    cause: error,
    ...error.param === undefined ? {} : { param: error.param }
  })
}

/** Forgets a name. Requests that run finish on their version. Throws ADAPTER_UNKNOWN. */
export async function unloadAdapter (
  { engine }: Pick<AdapterHost, 'engine'>,
  name: string,
  mode: UnloadMode = 'finish'
): Promise<AdapterInfo> {
  try {
    return await requireAdapters(engine).unload(name, mode)
  } catch (error) {
    throw ofAdapter(name, error)
  }
}

/** The error with the adapter's name in front. */
export function ofAdapter (name: string, error: unknown): unknown {
  return withPrefix(`LoRA adapter ${JSON.stringify(name.slice(0, MAX_SHOWN))}: `, error)
}

interface OpenAdapter {
  config: unknown
  source: WeightSource
  checksums?: Readonly<Record<string, string>>
}

/** `deliver`: opens the adapter and calls `write` once, which closes it. */
async function load (
  { engine, metrics, updates }: Pick<AdapterHost, 'engine' | 'metrics' | 'updates'>,
  fields: AdapterFields,
  path: string,
  deliver: (write: (opened: OpenAdapter) => Promise<AdapterReport>) => Promise<AdapterReport>
): Promise<AdapterReport> {
  const record = updates.begin({ adapter: fields.name.slice(0, MAX_SHOWN) })
  try {
    const adapters = checkLoad(engine, fields)
    const report = await deliver(async opened => {
      record.mark('announce')
      return await write(adapters, fields, path, opened, engine.deltaHost, record)
    })
    record.end(false)
    metrics.observeAdapter(report)
    return report
  } catch (error) {
    record.fail(error)
    metrics.observeFailedAdapter()
    throw ofAdapter(fields.name, error)
  }
}

/** Writes and closes. */
async function write (
  adapters: Adapters,
  { name, existing, pinned }: AdapterFields,
  path: string,
  { config, source, checksums }: OpenAdapter,
  host: DeltaHost | undefined,
  record: UpdateRecord
): Promise<AdapterReport> {
  const run = async (): Promise<AdapterReport> => {
    if (checksums !== undefined) requireNames(source, checksums)
    // Streamed bytes arrive in the slot, so the engine compares them there.
    const isStored = source.kind === 'stored'
    if (checksums !== undefined && isStored) await requireChecksums(source, checksums, host)
    return await adapters.load(name, config, source, {
      path,
      ...checksums === undefined || isStored ? {} : { checksums },
      ...existing === undefined ? {} : { existing },
      ...pinned === undefined ? {} : { pinned }
    })
  }
  try {
    const report = await run().finally(async () => {
      await source.close()
    })
    record.wroteAdapter(report, source.transport.name)
    return report
  } catch (error) {
    throw source.explain?.(error) ?? error
  }
}

/** Throws if the load would be refused whatever its tensors are. */
function checkLoad (engine: Pick<RolloutEngine, 'adapters'>, { name, existing }: AdapterFields): Adapters {
  const adapters = requireAdapters(engine)
  if (name === '' || name.length > MAX_NAME || !NAME.test(name)) {
    throw new RefitError(
      'INVALID_REQUEST',
      `lora_name: expected 1 to ${MAX_NAME} characters and no control characters, got ${
        JSON.stringify(name.slice(0, 100))
      }`,
      { param: 'lora_name' }
    )
  }
  if (existing === 'refuse' && adapters.get(name) !== undefined) throw alreadyLoaded(name)
  return adapters
}

function alreadyLoaded (name: string): RefitError {
  return new RefitError(
    'CONFLICT',
    `an adapter named ${JSON.stringify(name)} is already loaded; unload it first, or ask for its replacement`,
    { param: 'lora_name' }
  )
}
