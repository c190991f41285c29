// Lists over typed arrays that keep their memory from step to step.

type Numbers = Int32Array | Float32Array | Float64Array | Uint32Array

class Growable<T extends Numbers> {
  data: T
  length = 0
  readonly #make: (capacity: number) => T

  constructor (make: (capacity: number) => T) {
    this.#make = make
    this.data = make(64)
  }

  clear (): void {
    this.length = 0
  }

  push (value: number): void {
    if (this.length === this.data.length) this.#grow(this.length + 1)
    this.data[this.length++] = value
  }

  append (values: Numbers, from: number, to: number): void {
    const end = this.length + to - from
    if (end > this.data.length) this.#grow(end)
    // For a short copy a loop is faster than a view.
    if (to - from < 32) { for (let i = from; i < to; i++) this.data[this.length++] = values[i]! }
    else this.data.set(values.subarray(from, to), this.length)
    this.length = end
  }

  /** The used part, without a copy. */
  view (): T {
    return this.data.subarray(0, this.length) as T
  }

  #grow (atLeast: number): void {
    const data = this.#make(Math.max(atLeast, this.data.length * 2))
    data.set(this.data)
    this.data = data
  }
}

export type IntList = Growable<Int32Array>
export type FloatList = Growable<Float32Array>

export function intList (): IntList {
  return new Growable((capacity) => new Int32Array(capacity))
}

export type WordList = Growable<Uint32Array>

export function wordList (): WordList {
  return new Growable((capacity) => new Uint32Array(capacity))
}

export type DoubleList = Growable<Float64Array>

export function doubleList (): DoubleList {
  return new Growable((capacity) => new Float64Array(capacity))
}

export function floatList (): FloatList {
  return new Growable((capacity) => new Float32Array(capacity))
}
