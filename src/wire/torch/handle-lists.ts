import { DTYPES, isDType } from '../../native/dtypes.ts'
import { HANDLE_ROLES } from '../../native/handles.ts'
import type { HandleColumns, NativeHandles, HandleRole } from '../../native/handles.ts'
import { PickleBytes, PickleName } from '../pickle/values.ts'
import { MAX_TENSORS } from '../safetensors/header.ts'
import { mappedBytes, parseIpcHandle } from './ipc-handle.ts'
import type { IpcHandle } from './ipc-handle.ts'
import { torchNames } from './names.ts'
import { isShmName, toDevice } from './storage.ts'

// The usual request has thousands of handles of whole, row-major tensors. The addon reads such lists some ten times as
// fast as src/wire/torch/body.ts reads them, and returns null for all others: body.ts reads every payload and reports
// the errors.

export interface HandleSegment {
  device: number | string
  handle: IpcHandle /** 64 bytes each, as latin1. */
  events: string[]
}

/** Lists of CUDA tensors, one for each pickle. */
export interface HandleLists {
  columns: HandleColumns
  segments: HandleSegment[]
}

const EVENT_BYTES = 64

/** The lists in the pickles, or null if any of them is of another kind. */
export function readHandleLists ({ readHandles }: NativeHandles, pickles: readonly Uint8Array[]): HandleLists | null {
  const columns = readHandles(pickles, roleOf)
  if (columns === null || columns.dims.length > MAX_TENSORS || !columns.counters.every(({ file }) => isShmName(file))) {
    return null
  }
  try {
    return { columns, segments: segmentsOf(columns) }
  } catch {
    return null
  }
}

/** Throws TENSOR_PAYLOAD for a bad handle or GPU. */
function segmentsOf (
  { devices, deviceOf, reach, handles, handleEnds, events, eventEnds }: HandleColumns
): HandleSegment[] {
  const blobs = Buffer.from(handles.buffer)
  const waits = Buffer.from(events.buffer)
  const gpus = devices.map(device => toDevice(device))
  return Array.from(deviceOf, (device, index) => {
    const handle = parseIpcHandle(new PickleBytes(blobs, index === 0 ? 0 : handleEnds[index - 1]!, handleEnds[index]!))
    if (reach[index]! > (mappedBytes(handle) ?? Infinity)) throw new RangeError('a storage lies outside of its segment')
    const own: string[] = []
    for (let at = index === 0 ? 0 : eventEnds[index - 1]!; at < eventEnds[index]!; at += EVENT_BYTES) {
      own.push(waits.toString('latin1', at, at + EVENT_BYTES))
    }
    return { device: gpus[device]!, handle, events: own }
  })
}

function roleOf (module: string, name: string): HandleRole {
  const found = torchNames(module, name)
  if (!(found instanceof PickleName)) return HANDLE_ROLES.unknown
  switch (found.role) {
    case 'rebuild_cuda_tensor':
      return HANDLE_ROLES.rebuild
    case 'tensor class':
      return HANDLE_ROLES.tensorClass
    case 'storage class':
    case 'legacy storage class':
      return HANDLE_ROLES.storageClass
    case 'dtype':
      return isDType(found.name) ? HANDLE_ROLES.dtype + DTYPES[found.name] : HANDLE_ROLES.unknown
    default:
      return found.use === 'tuple' ? HANDLE_ROLES.tuple : HANDLE_ROLES.unknown
  }
}
