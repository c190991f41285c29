import type { KeptSet, Scored, ScoredRows } from '../../../src/contract/rollout-engine.ts'

// The scores that the fake engine reports; tests compute them again.

/** The score of an id at a position of any prompt, exact in float32. */
export function fakeScore (position: number, id: number): number {
  return -(position * 256 + id) / 1024
}

export function fakeScores ({ from, width, ids }: ScoredRows): Float32Array {
  return Float32Array.from(ids, (id, i) => id < 0 ? -Infinity : fakeScore(from + Math.floor(i / width), id))
}

/** A token with an odd id is kept with the token before it, an even one alone. */
export function keptOf (token: number): KeptSet {
  return { ids: Int32Array.from(token % 2 === 0 ? [token] : [token, token - 1]), logprob: -token / 1024 }
}

export function scored (token: number): Scored {
  return [-token / 100, token]
}

export function inputLogprobs (ids: Int32Array, start: number, top: number, wanted: number[]) {
  const positions = Array.from(ids).slice(start)
  const isFirst = (i: number): boolean => start + i === 0
  return {
    logprobs: positions.map((id, i): [number | null, number] => isFirst(i) ? [null, id] : [-id / 100, id]),
    top: positions.map((id, i) => isFirst(i) ? null : Array.from({ length: top }, (_, k): Scored => scored(id + k))),
    ids: positions.map((_, i) => isFirst(i) ? null : wanted.map(scored))
  }
}
