/** One reading of the lines of the page's charts. */
export interface Reading {
  tokensPerSecond: number
  running: number
  queued: number
  /** Part of the KV cache in use, 0 to 1. */
  kv: number
}

const EVERY_MS = 1000
const KEPT = 600

/** One reading a second of the last ten minutes, so that a page that opens later has them. */
export class History {
  readonly #timer: NodeJS.Timeout
  readonly #rows: [at: number, tps: number, running: number, queued: number, kv: number][] = []

  constructor (read: () => Reading) {
    this.#timer = setInterval(() => this.add(read()), EVERY_MS).unref()
  }

  add ({ tokensPerSecond, running, queued, kv }: Reading): void {
    this.#rows.push([Date.now(), Math.round(tokensPerSecond * 10) / 10, running, queued, Math.round(kv * 1e4) / 1e4])
    if (this.#rows.length > KEPT) this.#rows.shift()
  }

  get rows (): readonly (readonly number[])[] {
    return this.#rows
  }

  close (): void {
    clearInterval(this.#timer)
  }
}
