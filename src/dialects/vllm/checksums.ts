import type { RolloutEngine } from '../../contract/rollout-engine.ts'

/** One checksum for each part of a tensor that a rank holds, keyed by vLLM's name of the rank and the tensor's name. */
export type VllmChecksums = Record<string, string>

/** Checksums of all ranks by vLLM's keys. They are refit's own 64-bit checksums (docs/checksum.md), not SHA-256. */
export async function vllmChecksums (engine: RolloutEngine): Promise<VllmChecksums> {
  const { ranks } = await engine.checksums()
  return Object.fromEntries(
    ranks.flatMap((tensors, rank) =>
      tensors.map(({ name, checksum }): [string, string] => [`${prefix(rank)}:${name}`, checksum])
    )
  )
}

/**
 * The keys whose checksums differ between the reports; a key that a report lacks differs, too. The first report is the
 * baseline.
 */
export function compareReports (
  reports: readonly VllmChecksums[]
): { match: boolean, mismatches: string[], ranks: string[] } {
  const keys = [...new Set(reports.flatMap(report => Object.keys(report)))].sort()
  const mismatches = keys.filter(key => reports.some(report => report[key] !== reports[0]![key]))
  // A key is dp:pp:pcp:tp:name; its first four parts are the rank.
  const ranks = [...new Set(keys.map(key => key.split(':').slice(0, 4).join(':')))].sort()
  return { match: mismatches.length === 0, mismatches, ranks }
}

function prefix (rank: number): string {
  return `dp0:pp0:pcp0:tp${rank}`
}
