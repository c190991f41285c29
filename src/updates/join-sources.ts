import type { StoredSource } from '../contract/weight-source.ts'

/** The tensors of several sources as one source. It closes none of them. */
export function joinSources (parts: readonly StoredSource[]): StoredSource {
  let base = 0
  const tensors = parts.flatMap(part => {
    const first = base
    base += part.sources.length
    return part.tensors.map(tensor => ({ ...tensor, source: first + tensor.source }))
  })
  return { ...parts[0]!, tensors, sources: parts.flatMap(({ sources }) => sources) }
}
