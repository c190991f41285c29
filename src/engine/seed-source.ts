import { randomFillSync } from 'node:crypto'

/** Draws 64-bit seeds: random ones, or a fixed sequence (SplitMix64) from `seed`. */
export function seedSource (seed: bigint | null): () => bigint {
  if (seed === null) {
    const drawn = new BigUint64Array(1)
    return () => randomFillSync(drawn)[0]!
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
