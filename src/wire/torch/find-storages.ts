import { PickleBytes, PickleDict, PickleList, PickleName, PickleObject, PickleSet } from '../pickle/values.ts'
import type { PickleTuple, PickleValue } from '../pickle/values.ts'
import { isGpuDict, toGpuUuid } from './gpus.ts'
import { readNested, readPayload } from './payload.ts'
import { salvageNames } from './names.ts'
import { isCudaArgs } from './rebuild.ts'
import { StorageTable } from './storage.ts'
import type { StorageOptions } from './storage.ts'
import type { TensorStorage } from './tensor.ts'

/**
 * Every storage that the entries of a request name, without duplicates, even if the entries are otherwise invalid.
 * After a refusal the sender's references must be given back, or its memory is never freed. Names outside the closed
 * set become records. Never throws; a malformed entry gives no storages. `gpus`: if a tensor is offered on several
 * GPUs, only storages on these are listed, because the others belong to other engines.
 */
export function findStorages (
  entries: ReadonlyArray<string | Uint8Array>,
  options: StorageOptions = {},
  gpus?: readonly string[]
): TensorStorage[] {
  const own = gpus?.map(gpu => toGpuUuid(gpu))
  const storages = new StorageTable(options)
  // Equal texts name the same storages. References in shared memory are counted per pickle, not per copy of it.
  for (
    const entry of new Set(
      entries.map(entry => typeof entry === 'string' ? entry : Buffer.from(entry).toString('latin1'))
    )
  ) {
    const root = attempt(() => readPayload(Buffer.from(entry, 'latin1'), salvageNames))
    if (root !== undefined) collect(root, storages, own)
  }
  return storages.list
}

/** Visits every value that the root reaches, and that the pickles in it reach, once. */
export function collect (root: PickleValue, storages: StorageTable, own?: ReadonlyArray<string | undefined>): void {
  const seen = new Set<PickleValue>()
  const inner: PickleValue[] = []
  const onPickles = (roots: readonly PickleValue[]): void => roots.forEach(root => inner.push(root))
  collectOuter(root, { storages, seen, own, onPickles })
  // A tensor's pickle holds no other one. A chain of pickles in pickles would cost a second per megabyte.
  for (const root of inner) collectOuter(root, { storages, seen, own, onPickles: undefined })
}

interface Search {
  storages: StorageTable
  seen: Set<PickleValue>
  own: ReadonlyArray<string | undefined> | undefined
  /** Takes the roots of pickles in the values; undefined: they are not read. */
  onPickles: ((roots: readonly PickleValue[]) => void) | undefined
}

function collectOuter (root: PickleValue, { storages, seen, own, onPickles }: Search): void {
  const open: PickleValue[] = [root]
  const visit = (values: readonly PickleValue[]): void => {
    for (const value of values) {
      if (value === null || typeof value !== 'object' || seen.has(value)) continue
      seen.add(value)
      open.push(value)
    }
  }
  for (let value = open.pop(); value !== undefined; value = open.pop()) {
    if (Array.isArray(value)) {
      if (value[0] instanceof PickleName && Array.isArray(value[1])) take(value[0], value[1], storages)
      visit(value)
    } else if (value instanceof PickleList || value instanceof PickleSet) visit(value.items)
    else if (value instanceof PickleDict) {
      if (isGpuDict(value)) {
        takeOffer(value, storages, own)
        if (own !== undefined) continue
      }
      visit(value.keys)
      visit(value.values)
    } else if (value instanceof PickleObject) {
      take(value.name, value.args, storages)
      if (value.name.role.startsWith('rebuild_storage_')) attempt(() => storages.cpu(value as PickleObject))
      visit(value.args)
      if (value.name.role === 'LocalSerializedTensor') onPickles?.(nested(value.state?.get('values'), seen))
      else if (value.state !== null) visit([value.state])
    }
  }
}

/** Handles by GPU. Newer senders leave out the function; only the dict shows that their tuples are arguments. */
function takeOffer (
  { keys, values }: PickleDict,
  storages: StorageTable,
  own?: ReadonlyArray<string | undefined>
): void {
  for (const [index, value] of values.entries()) {
    if (own !== undefined && values.length > 1 && !own.includes(toGpuUuid(keys[index] as string))) continue
    const args = isCudaArgs(value)
      ? value
      : value instanceof PickleObject
      ? value.args
      : Array.isArray(value)
      ? value[1]
      : value
    if (isCudaArgs(args)) attempt(() => storages.cuda(args, toGpuUuid(keys[index] as string)))
  }
}

function take (name: PickleName, args: PickleTuple, storages: StorageTable): void {
  if (name.role === 'rebuild_cuda_tensor') attempt(() => storages.cuda(args))
}

/** Roots of the pickles in a LocalSerializedTensor. Each is read once, however many objects hold it. */
function nested (values: PickleValue | undefined, seen: Set<PickleValue>): PickleValue[] {
  if (!(values instanceof PickleList) || seen.has(values)) return []
  seen.add(values)
  const roots: PickleValue[] = []
  for (const value of values.items) {
    if (!(value instanceof PickleBytes) || seen.has(value)) continue
    seen.add(value)
    const root = attempt(() => readNested(value.view(), salvageNames))
    if (root !== undefined) roots.push(root)
  }
  return roots
}

function attempt<T> (read: () => T): T | undefined {
  try {
    return read()
  } catch {
    return undefined
  }
}
