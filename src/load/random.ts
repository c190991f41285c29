/** A repeatable source of numbers in [0, 1): sfc32 (Chris Doty-Humphrey's PractRand), seeded with splitmix32. */
export type Random = () => number

/** `stream` separates sources with one seed, so that a change of one leaves the others as they are. */
export function randomFrom (seed: number, stream: number): Random {
  let state = Math.imul(seed, 0x9e3779b1) ^ Math.imul(stream + 1, 0x85ebca6b)
  const mix = (): number => {
    state = (state + 0x9e3779b9) | 0
    let word = Math.imul(state ^ (state >>> 16), 0x21f0aaad)
    word = Math.imul(word ^ (word >>> 15), 0x735a2d97)
    return word ^ (word >>> 15)
  }
  let [a, b, c, counter] = [mix(), mix(), mix(), 1]
  return () => {
    const sum = (((a + b) | 0) + counter) | 0
    counter = (counter + 1) | 0
    a = b ^ (b >>> 9)
    b = (c + (c << 3)) | 0
    c = ((c << 21) | (c >>> 11)) + sum | 0
    return (sum >>> 0) / 2 ** 32
  }
}

/** An exponential draw: the gap between two arrivals of a Poisson process with this mean gap. */
export function exponential (random: Random, mean: number): number {
  return -mean * Math.log(1 - random())
}

/** An integer from `least` to `most`, both included. */
export function integer (random: Random, least: number, most: number): number {
  return least + Math.floor(random() * (most - least + 1))
}
