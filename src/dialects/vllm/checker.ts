import type { RolloutEngine } from '../../contract/rollout-engine.ts'

/** One checksum for each part of a tensor that a rank holds, under vLLM's key of the rank. */
export type VllmChecksums = Record<string, string>

/** Checksums of all ranks by vLLM's keys. They are refit's own (docs/checksum.md), of 64 bits, not SHA-256. */
export async function vllmChecksums (engine: RolloutEngine): Promise<VllmChecksums> {
  const { ranks } = await engine.checksums()
  return Object.fromEntries(
    ranks.flatMap((tensors, rank) =>
      tensors.map(({ name, checksum }): [string, string] => [`${prefix(rank)}:${name}`, checksum])
    )
  )
}

/** What differs among reports, the first of which is the baseline: a key that one lacks differs, too. */
export function compareChecksums (
  reports: readonly VllmChecksums[]
): { match: boolean, mismatches: string[], ranks: string[] } {
  const keys = [...new Set(reports.flatMap(report => Object.keys(report)))].sort()
  const mismatches = keys.filter(key => reports.some(report => report[key] !== reports[0]![key]))
  // A rank is all that stands before the tensor's name.
  const ranks = [...new Set(keys.map(key => key.split(':').slice(0, 4).join(':')))].sort()
  return { match: mismatches.length === 0, mismatches, ranks }
}

function prefix (rank: number): string {
  return `dp0:pp0:pcp0:tp${rank}`
}
