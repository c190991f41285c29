import type { HandleLists } from '../../wire/torch/handle-lists.ts'
import type { TensorStorage } from '../../wire/torch/tensor.ts'

/**
 * References that senders hold for this process, one for each handle: how many of each file, and which slots of each
 * counter file.
 */
export interface HandleReferences {
  files: Map<string, number>
  counters: Map<string, Int32Array<ArrayBuffer>>
}

export function referencesOf (storages: Iterable<TensorStorage>): HandleReferences {
  const files = new Map<string, number>()
  const slots = new Map<string, number[]>()
  for (const storage of storages) {
    if (storage.kind === 'shared-file') files.set(storage.file, (files.get(storage.file) ?? 0) + 1)
    else if (storage.kind === 'cuda') {
      const list = slots.get(storage.counterFile)
      if (list === undefined) slots.set(storage.counterFile, [storage.counterSlot])
      else list.push(storage.counterSlot)
    }
  }
  return { files, counters: new Map([...slots].map(([file, list]) => [file, Int32Array.from(list)])) }
}

export function referencesOfLists ({ columns: { counters } }: HandleLists): HandleReferences {
  return { files: new Map(), counters: new Map(counters.map(({ file, slots }) => [file, slots])) }
}

/** The names of all files that the references are in. */
export function filesOf (references: readonly HandleReferences[]): string[] {
  return references.flatMap(({ files, counters }) => [...files.keys(), ...counters.keys()])
}
