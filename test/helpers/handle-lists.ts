import { announceTensors } from '../../src/sources/announce-tensors.ts'
import { announceLists, AnnouncedReader } from '../../src/sources/tensor/announced-columns.ts'
import { referencesOf, referencesOfLists } from '../../src/sources/tensor/handle-references.ts'
import type { HandleReferences } from '../../src/sources/tensor/handle-references.ts'
import { readTensorBody } from '../../src/wire/torch/body.ts'
import type { HandleLists } from '../../src/wire/torch/handle-lists.ts'
import type { IpcHandle } from '../../src/wire/torch/ipc-handle.ts'
import type { AnnouncedTensor } from '../../src/contract/weight-source.ts'

// The contents of handle lists in one form, from the addon's fast reader and from the reader of all payloads.

interface Described {
  tensors: Array<Omit<AnnouncedTensor, 'source'> & { segment: string }>
  /** Events of each segment. */
  events: Record<string, string[]>
  counters: Record<string, number[]>
}

export function describeLists (lists: HandleLists, pickles: number): Described {
  const { columns, segments } = lists
  const ranks = Array.from({ length: pickles }, (_, rank) => [rank])
  const tensors = new AnnouncedReader().read(announceLists(columns, Int32Array.from(segments.keys()), ranks))
  const events: Described['events'] = {}
  for (const { device, handle, events: own } of segments) (events[keyOf(device, handle)] ??= []).push(...own)
  return {
    tensors: tensors.map(({ source, ...tensor }) => ({
      ...tensor,
      segment: keyOf(segments[source]!.device, segments[source]!.handle)
    })),
    events: sorted(events),
    counters: slotsOf(referencesOfLists(lists))
  }
}

/** `pickles`: one for each rank. Throws if one is no list of GPU tensors. */
export function describeBodies (pickles: readonly Uint8Array[]): Described {
  const { ranks, storages } = readTensorBody({ entries: pickles, loadFormat: null, ranks: pickles.length })
  const tensors = announceTensors(ranks, new Map(storages.map((storage, index) => [storage, index])))
  const events: Described['events'] = {}
  const keys = storages.map(storage => {
    if (storage.kind !== 'cuda') throw new TypeError(`a storage of the kind ${storage.kind}`)
    const key = keyOf(storage.device, storage.handle)
    const own = events[key] ??= []
    if (storage.event !== null) own.push(storage.event)
    return key
  })
  return {
    tensors: tensors.map(({ source, ...tensor }) => ({ ...tensor, segment: keys[source]! })),
    events: sorted(events),
    counters: slotsOf(referencesOf(storages))
  }
}

function keyOf (device: number | string, handle: IpcHandle): string {
  return JSON.stringify([device, handle])
}

function sorted (events: Described['events']): Described['events'] {
  return Object.fromEntries(Object.entries(events).sort().map(([key, own]) => [key, [...new Set(own)].sort()]))
}

function slotsOf ({ counters }: HandleReferences): Described['counters'] {
  return Object.fromEntries([...counters].sort().map(([file, slots]) => [file, [...slots].sort((a, b) => a - b)]))
}
