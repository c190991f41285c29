import { randomFillSync } from 'node:crypto'

/** Random seeds of one call: a call costs as much as a hundred of them. */
const DRAWN = 256

/** Draws 64-bit seeds: random ones, or a fixed sequence (SplitMix64) from `seed`. */
export function seedSource (seed: bigint | null): () => bigint {
  if (seed === null) {
    const drawn = new BigUint64Array(DRAWN)
    let used = DRAWN
    return () => {
      if (used === DRAWN) {
        randomFillSync(drawn)
        used = 0
      }
      return drawn[used++]!
    }
  }
  let state = BigInt.asUintN(64, seed)
  return () => {
    state = BigInt.asUintN(64, state + 0x9e3779b97f4a7c15n)
    let z = state
    z = BigInt.asUintN(64, (z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n)
    z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn)
    return z ^ (z >> 31n)
  }
}
