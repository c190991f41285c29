import type { Differences } from '../http/samples/difference-tally.ts'
import { VERSIONS } from '../http/samples/truth-meter.ts'
import type { Measured, Truth } from '../http/samples/truth-schemas.ts'

type Versions = Truth['versions']

/** One report of the parts that several engines have compared. `unknown`: ids that no engine keeps. */
export function joinReports (parts: readonly Measured[], unknown: readonly string[]): Measured {
  return {
    samples: sum(parts.map(({ samples }) => samples)),
    ...joinDifferences(parts),
    unknown: [...parts.flatMap(part => part.unknown), ...unknown],
    repeated: sum(parts.map(({ repeated }) => repeated)),
    versions: joinVersions(parts)
  }
}

export function joinTruths (parts: readonly Truth[]): Truth {
  return {
    samples: sum(parts.map(({ samples }) => samples)),
    ...joinDifferences(parts),
    warnings: sum(parts.map(({ warnings }) => warnings)),
    versions: joinVersions(parts).slice(-VERSIONS)
  }
}

/** `p99` is the largest one, which is never below that of all tokens together. */
function joinDifferences (parts: readonly Differences[]): Differences {
  const tokens = sum(parts.map(part => part.tokens))
  const mean = (name: 'mean' | 'kl' | 'clipped'): number =>
    sum(parts.map(part => part[name] * part.tokens)) / Math.max(1, tokens)
  return {
    tokens,
    mean: mean('mean'),
    max: Math.max(0, ...parts.map(({ max }) => max)),
    p99: Math.max(0, ...parts.map(({ p99 }) => p99)),
    kl: mean('kl'),
    clipped: mean('clipped')
  }
}

/** Keeps the order of each part: engines get the same updates, and not every engine has measured every version. */
function joinVersions (parts: readonly { versions: Versions }[]): Versions {
  const order: string[] = []
  for (const { versions } of parts) {
    let at = 0
    for (const { version } of versions) {
      const known = order.indexOf(version)
      if (known >= 0) at = known + 1
      else order.splice(at++, 0, version)
    }
  }
  const all = parts.flatMap(({ versions }) => versions)
  return order.map(version => ({ version, ...joinDifferences(all.filter(one => one.version === version)) }))
}

function sum (values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0)
}
