import { maskWords, MOST_KEPT, ROW_FLOATS, ROW_INTS, ROW_WANT_KEPT } from '../../src/native/step.ts'
import type { StepBatch, StepResult } from '../../src/native/step.ts'
import type { StepDevice } from '../../src/engine/step-device.ts'

// A device with the contract of `StepBatch` and without a model. Its KV cache stores (token, position, weights) for
// each slot of a page, and the next token is a hash of everything that the row reads through its page table. A wrong
// page, a page that was freed too early, stale KV, a wrong position or a row of a wrong sequence gives a wrong token.

export interface Row {
  topK: number
  flags: number
  floats: ArrayLike<number>
  seed: bigint
  historyPrompt: number
  history: ArrayLike<number>
  bias: [number, number][]
  mask: Uint32Array | null
}

/** Row of a scored prompt position. */
export const SCORE_ROW: Omit<Row, 'seed'> = {
  topK: 0,
  flags: 3,
  floats: [1, 1, 0, 0, 0, 1],
  historyPrompt: 0,
  history: [],
  bias: [],
  mask: null
}

/** Contents of the slots that a row reads: tokens in order, and the weights that computed the KV of each. */
export interface Context {
  tokens: ArrayLike<number>
  weights: ArrayLike<number>
  current: number
}

const bits = new DataView(new ArrayBuffer(4))

function mix (h: number, value: number): number {
  h = Math.imul(h ^ (value | 0), 0x85ebca6b)
  return h ^ (h >>> 13)
}

function mixFloat (h: number, value: number): number {
  bits.setFloat32(0, value)
  return mix(h, bits.getInt32(0))
}

function contextHash ({ tokens, weights, current }: Context): number {
  let h = mix(17, current)
  for (let i = 0; i < tokens.length; i++) h = mix(mix(mix(h, tokens[i]!), i), weights[i]!)
  return h
}

/** The token that the fake samples after `context`. The tests use the same function as their oracle. */
export function nextToken (context: Context, row: Row, vocab: number): number {
  let h = contextHash(context)
  h = mix(mix(h, Number(row.seed & 0xffffffffn)), Number(row.seed >> 32n))
  h = mix(mix(h, row.topK), row.historyPrompt)
  for (let i = 0; i < ROW_FLOATS; i++) h = mixFloat(h, row.floats[i]!)
  for (let i = 0; i < row.history.length; i++) h = mix(h, row.history[i]!)
  const banned = new Set<number>()
  for (const [token, bias] of row.bias) {
    if (bias === -Infinity) banned.add(token)
    else h = mixFloat(mix(h, token), bias)
  }
  for (let tries = 0;; tries++) {
    const token = (h >>> 0) % vocab
    const allowed = row.mask === null || (row.mask[token >>> 5]! >>> (token & 31) & 1) === 1
    if ((!banned.has(token) && allowed) || tries > 100 * vocab) return token
    h = mix(h, 1)
  }
}

/** The logprob that the fake gives `token` after `context`. */
export function logprobOf (context: Context, flags: number, token: number): number {
  return -((mix(mix(contextHash(context), flags), token) >>> 0) % 4096) / 64
}

/** The kept set of a token that the fake samples after `context`: up to 5 tokens, or `most` if that is set. */
export function keptAfter (context: Context, token: number, most: number | null = null): number[] {
  return Array.from({ length: most ?? 1 + (mix(contextHash(context), token) >>> 0) % 5 }, (_, i) => token + i)
}

/** Values that the fake records for a token: its position, and the weights that computed it. */
export const RECORDED = 3
export function expertsOf (token: number, position: number, weights: number): number[] {
  return [token, position, weights]
}

export class FakeDevice implements StepDevice {
  /** Number of the current weights. */
  weights = 0
  /** Numbers of the weights in each set, if there are two; then a step uses those of its set. */
  sets: [number, number] | null = null
  /** Size of all kept sets; null for sizes that depend on the context. */
  keptMost: number | null = null
  /** Throws in the next step. */
  fault: Error | null = null
  steps = 0
  maxTokens = 0
  /** Number of tokens computed. */
  computed = 0
  readonly #begun: StepBatch[] = []
  /** The tokens of the step before, by row; empty if it failed. */
  #tokensBefore = new Int32Array(0)
  readonly #vocab: number
  readonly #pageSize: number
  readonly #pages: number
  readonly #tokens: Int32Array
  readonly #positions: Int32Array
  readonly #weights: Int32Array

  constructor (pages: number, pageSize: number, vocab: number) {
    this.#pages = pages
    this.#pageSize = pageSize
    this.#vocab = vocab
    this.#tokens = new Int32Array(pages * pageSize).fill(-1)
    this.#positions = new Int32Array(pages * pageSize).fill(-1)
    this.#weights = new Int32Array(pages * pageSize).fill(-1)
  }

  begin (batch: StepBatch): void {
    if (this.#begun.length === 2) throw new Error('three steps are under way')
    // Copies: the caller reuses its arrays.
    this.#begun.push(Object.fromEntries(
      Object.entries(batch).map(([name, value]) => [name, typeof value === 'number' ? value : value.slice()])
    ) as unknown as StepBatch)
  }

  /** Number of steps under way. */
  get underWay (): number {
    return this.#begun.length
  }

  /** Computes the step here, as late as a device may: all that changes under a step under way gives wrong tokens. */
  collect (): StepResult {
    const batch = this.#begun.shift()
    if (batch === undefined) throw new Error('no step is under way')
    const before = this.#tokensBefore
    this.#tokensBefore = new Int32Array(0)
    batch.tokens.forEach((token, i) => {
      if (token >= 0) return
      if (~token >= before.length) throw new Error('the step takes tokens of the step before, which failed')
      batch.tokens[i] = before[~token]!
    })
    const result = this.#compute(batch)
    this.#tokensBefore = result.tokens.slice()
    return result
  }

  #compute (batch: StepBatch): StepResult {
    this.steps++
    if (this.sets !== null) this.weights = this.sets[batch.set ?? 0]!
    if (this.fault !== null) {
      const { fault } = this
      this.fault = null
      throw fault
    }
    const rows = this.#validate(batch)
    this.#store(batch)
    const result: StepResult = {
      tokens: new Int32Array(rows),
      logprobs: new Float32Array(rows).fill(NaN),
      topIds: new Int32Array(0),
      topLogprobs: new Float32Array(0),
      idLogprobs: new Float32Array(0),
      experts: this.#record(batch),
      keptCounts: new Int32Array(0),
      keptLogprobs: new Float32Array(0),
      keptIds: new Int32Array(0)
    }
    const topIds: number[] = []
    const topLogprobs: number[] = []
    const idLogprobs: number[] = []
    const kept: number[][] = []
    for (let row = 0; row < rows; row++) {
      const [index, target, topK, top, flags, historyPrompt] = batch.rowInts.subarray(row * ROW_INTS) as unknown as [
        number,
        number,
        number,
        number,
        number,
        number
      ]
      const context = this.#read(batch, index)
      const words = maskWords(this.#vocab)
      const mask = batch.rowInts[row * ROW_INTS + 6]!
      const bias: [number, number][] = []
      for (let i = batch.biasOffsets[row]!; i < batch.biasOffsets[row + 1]!; i++) {
        bias.push([
          batch.biasTokens[i]!,
          batch.biasValues[i]!
        ])
      }
      const token = target >= 0
        ? target
        : nextToken(context, {
          topK,
          flags,
          floats: batch.rowFloats.subarray(row * ROW_FLOATS, (row + 1) * ROW_FLOATS),
          seed: batch.rowSeeds[row]!,
          historyPrompt,
          history: batch.history.subarray(batch.historyOffsets[row], batch.historyOffsets[row + 1]),
          bias,
          mask: mask < 0 ? null : batch.masks.subarray(mask * words, (mask + 1) * words)
        }, this.#vocab)
      result.tokens[row] = token
      if ((flags & 1) !== 0) result.logprobs[row] = logprobOf(context, flags & ~ROW_WANT_KEPT, token)
      kept.push((flags & ROW_WANT_KEPT) === 0 ? [] : keptAfter(context, token, this.keptMost))
      for (let i = 0; i < top; i++) {
        topIds.push(i)
        topLogprobs.push(logprobOf(context, flags & ~ROW_WANT_KEPT, i))
      }
      for (let i = batch.idOffsets[row]!; i < batch.idOffsets[row + 1]!; i++) {
        idLogprobs.push(logprobOf(context, flags & ~ROW_WANT_KEPT, batch.ids[i]!))
      }
    }
    if (kept.some(ids => ids.length > 0)) {
      result.keptCounts = Int32Array.from(kept, ids => ids.length)
      result.keptIds = Int32Array.from(kept.filter(ids => ids.length <= MOST_KEPT).flat())
      result.keptLogprobs = Float32Array.from(kept, (ids, row) => ids.length === 0 ? NaN : -result.tokens[row]! / 8)
    }
    result.topIds = Int32Array.from(topIds)
    result.topLogprobs = Float32Array.from(topLogprobs)
    result.idLogprobs = Float32Array.from(idLogprobs)
    return result
  }

  /** As strict as a real device. Returns the number of rows. */
  #validate (b: StepBatch): number {
    const sequences = b.startPos.length
    const rows = b.rowSeeds.length
    const must = (ok: boolean, what: string): void => {
      if (!ok) throw new Error(`malformed batch: ${what}`)
    }
    const offsets = (list: Int32Array, count: number, end: number, what: string): void => {
      must(list.length === count + 1 && list[0] === 0 && list[count] === end, `${what} offsets`)
      for (let i = 0; i < count; i++) must(list[i]! <= list[i + 1]!, `${what} offsets fall`)
    }
    must(sequences > 0 && b.tokens.length > 0, 'empty')
    offsets(b.seqOffsets, sequences, b.tokens.length, 'sequence')
    offsets(b.pageOffsets, sequences, b.pages.length, 'page')
    offsets(b.historyOffsets, rows, b.history.length, 'history')
    offsets(b.biasOffsets, rows, b.biasTokens.length, 'bias')
    offsets(b.idOffsets, rows, b.ids.length, 'id')
    must(b.biasValues.length === b.biasTokens.length, 'bias values')
    must(b.rowInts.length === rows * ROW_INTS && b.rowFloats.length === rows * ROW_FLOATS, 'row fields')
    for (const token of [...b.tokens, ...b.history, ...b.biasTokens, ...b.ids]) {
      must(token >= 0 && token < this.#vocab, `token ${token}`)
    }
    for (const page of b.pages) must(page >= 0 && page < this.#pages, `page ${page}`)
    for (let s = 0; s < sequences; s++) {
      const count = b.seqOffsets[s + 1]! - b.seqOffsets[s]!
      const pages = b.pageOffsets[s + 1]! - b.pageOffsets[s]!
      must(count > 0, 'a sequence without tokens')
      must(
        pages === Math.ceil((b.startPos[s]! + count) / this.#pageSize),
        `${pages} pages for ${b.startPos[s]! + count} tokens`
      )
    }
    const words = maskWords(this.#vocab)
    must(b.masks.length % words === 0, 'mask words')
    for (let row = 0; row < rows; row++) {
      const mask = b.rowInts[row * ROW_INTS + 6]!
      must(mask >= -1 && mask * words < Math.max(1, b.masks.length), 'mask')
      must(b.rowInts[row * ROW_INTS]! < b.tokens.length, 'row index')
      must(row === 0 || b.rowInts[row * ROW_INTS]! >= b.rowInts[(row - 1) * ROW_INTS]!, 'rows out of order')
    }
    this.maxTokens = Math.max(this.maxTokens, b.tokens.length)
    this.computed += b.tokens.length
    return rows
  }

  #slot (b: StepBatch, s: number, position: number): number {
    return b.pages[b.pageOffsets[s]! + Math.floor(position / this.#pageSize)]! * this.#pageSize +
      position % this.#pageSize
  }

  #record (b: StepBatch): Uint16Array {
    const experts: number[] = []
    for (let s = 0; s < b.startPos.length; s++) {
      for (let i = b.seqOffsets[s]!; i < b.seqOffsets[s + 1]!; i++) {
        experts.push(...expertsOf(b.tokens[i]!, b.startPos[s]! + i - b.seqOffsets[s]!, this.weights))
      }
    }
    return Uint16Array.from(experts)
  }

  #store (b: StepBatch): void {
    const written = new Set<number>()
    for (let s = 0; s < b.startPos.length; s++) {
      for (let i = b.seqOffsets[s]!; i < b.seqOffsets[s + 1]!; i++) {
        const position = b.startPos[s]! + i - b.seqOffsets[s]!
        const slot = this.#slot(b, s, position)
        if (written.has(slot)) throw new Error('two sequences write one KV slot in one step')
        written.add(slot)
        this.#tokens[slot] = b.tokens[i]!
        this.#positions[slot] = position
        this.#weights[slot] = this.weights
      }
    }
  }

  /** Everything that the token at `index` attends to. */
  #read (b: StepBatch, index: number): Context {
    let s = 0
    while (b.seqOffsets[s + 1]! <= index) s++
    const length = b.startPos[s]! + index - b.seqOffsets[s]! + 1
    const tokens = new Int32Array(length)
    const weights = new Int32Array(length)
    for (let position = 0; position < length; position++) {
      const slot = this.#slot(b, s, position)
      if (this.#positions[slot] !== position) {
        throw new Error(`KV slot ${slot} is read as position ${position} but holds ${this.#positions[slot]}`)
      }
      tokens[position] = this.#tokens[slot]!
      weights[position] = this.#weights[slot]!
    }
    return { tokens, weights, current: this.weights }
  }
}
