import { Type } from 'typebox'
import type { Static } from 'typebox'
import type { AdapterInfo, AdapterReport, Adapters } from '../../contract/adapters.ts'
import type { ErrorCode } from '../../errors.ts'

// Replies about LoRA adapters.

const MAX_LISTED = 10

export const Adapter = Type.Object({
  name: Type.String(),
  version: Type.Integer({ description: 'Grows with every load, whatever its name.' }),
  path: Type.String({ description: 'The folder that it came from, or "__tensor__".' }),
  rank: Type.Integer({ description: 'Largest rank of its modules.' }),
  modules: Type.Array(Type.String(), { description: 'Last parts of the names of its modules.' }),
  digest: Type.String({ description: 'Checksum over its tensors as every rank holds them (docs/adapters.md).' }),
  pinned: Type.Boolean(),
  resident: Type.Boolean({ description: 'It is in a slot; otherwise it waits in host memory.' }),
  requests: Type.Integer({ description: 'Requests that use this version or wait for it.' })
}, { title: 'Adapter', description: 'A LoRA adapter: the version that its name stands for.' })

export const AdapterLoaded = Type.Object({
  ...Adapter.properties,
  tensors: Type.Integer(),
  bytes: Type.Integer(),
  missing: Type.Array(Type.String(), {
    description:
      'Modules that the configuration targets and that were not sent (at most 100): there the model is the base.'
  }),
  missing_count: Type.Integer(),
  is_zero: Type.Boolean({ description: 'Every B is zero, so the adapter changes nothing.' }),
  replaced: Type.Optional(Type.Integer({ description: 'The version that lost the name.' })),
  warnings: Type.Array(Type.String()),
  ms: Type.Object({ plan: Type.Number(), wait: Type.Number(), write: Type.Number(), total: Type.Number() })
}, { title: 'AdapterReport', description: 'Every rank holds this version, and new requests use it.' })

export function toAdapter (
  { name, version, path, rank, modules, digest, pinned, resident, requests }: AdapterInfo
): Static<typeof Adapter> {
  return { name, version, path, rank, modules: [...modules], digest, pinned, resident, requests }
}

export function toAdapterReport (report: AdapterReport): Static<typeof AdapterLoaded> {
  const { tensors, bytes, missing, missingCount, isZero, replaced, ms } = report
  return {
    ...toAdapter(report),
    tensors,
    bytes,
    missing,
    missing_count: missingCount,
    is_zero: isZero,
    ...replaced === undefined ? {} : { replaced },
    warnings: warningsOf(report),
    ms
  }
}

/** Facts about a load that succeeded, and that its sender did not intend most likely. */
export function warningsOf ({ missing, missingCount, isZero, replaced }: AdapterReport): string[] {
  const warnings: string[] = []
  if (missingCount > 0) {
    const listed = missing.slice(0, MAX_LISTED).join(', ')
    warnings.push(`${missingCount} modules that the configuration targets were not sent: ${listed}`)
  }
  // A new adapter changes nothing before its first training step.
  if (isZero && replaced !== undefined) {
    warnings.push(`every B is zero, although it replaces version ${replaced}: it changes nothing`)
  }
  return warnings
}

/** A logger of Fastify's. */
interface Log {
  info: (fields: object, line: string) => void
  warn: (fields: object, line: string) => void
}

export function logAdapter (log: Log, report: AdapterReport): void {
  const { name: adapter, version, path, digest, tensors, bytes, ms, replaced } = report
  log.info({ adapter, version, path, digest, tensors, bytes, ms, replaced }, 'LoRA adapter loaded')
  for (const warning of warningsOf(report)) log.warn({ adapter, version }, `LoRA adapter: ${warning}`)
}

/** SGLang's reply to its adapter routes. */
export const SglangAdapters = Type.Object({
  rid: Type.Null(),
  http_worker_ipc: Type.Null(),
  success: Type.Literal(true),
  error_message: Type.Null(),
  loaded_adapters: Type.Record(Type.String(), Type.String(), { description: 'Paths of all loaded adapters by name.' }),
  status: Type.Literal('ok', { description: "prime-rl's field." }),
  adapter: Type.Optional(AdapterLoaded),
  checksums_verified: Type.Optional(
    Type.Boolean({ description: 'The bytes of every tensor have the expected checksum.' })
  )
}, { title: 'AdapterReply', description: 'Done.' })

export function toSglangAdapters (adapters: Adapters, report?: AdapterReport): Static<typeof SglangAdapters> {
  return {
    rid: null,
    http_worker_ipc: null,
    success: true,
    error_message: null,
    loaded_adapters: Object.fromEntries(adapters.list().map(({ name, path }) => [name, path])),
    status: 'ok',
    ...report === undefined ? {} : { adapter: toAdapterReport(report) }
  }
}

/** SGLang's refusal. */
export const AdapterRefusal = Type.Object({
  rid: Type.Optional(Type.Null()),
  http_worker_ipc: Type.Optional(Type.Null()),
  success: Type.Optional(Type.Literal(false)),
  error_message: Type.Optional(Type.String()),
  loaded_adapters: Type.Optional(Type.Null()),
  error: Type.Union([
    Type.Object({ message: Type.String(), code: Type.String({ description: 'A stable code, such as UNSUPPORTED.' }) }),
    Type.String({ description: '"Unauthorized" or "Forbidden".' })
  ])
}, { title: 'AdapterRefusal', description: 'Refused; nothing has changed.' })

/** SGLang answers every refusal of an adapter with 400. prime-rl sends no request again after it. */
export const SGLANG_STATUSES: Partial<Record<ErrorCode, number>> = {
  ADAPTER_UNKNOWN: 400,
  ADAPTERS_FULL: 400,
  CONFLICT: 400,
  NOT_FOUND: 400
}

/** vLLM's: 404 for a folder that is not there, 400 for a name that is taken, 500 for the rest. */
export const VLLM_STATUSES: Partial<Record<ErrorCode, number>> = {
  ADAPTER_REFUSED: 500,
  ADAPTERS_FULL: 500,
  CHECKPOINT_CHANGED: 500,
  CHECKPOINT_FORMAT: 500,
  CHECKPOINT_PATH: 404,
  CONFLICT: 400
}
