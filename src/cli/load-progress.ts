const DRAW_EVERY_MS = 100
const LOG_EVERY_MS = 1000
const WIDTH = 30

interface Terminal {
  isTTY?: boolean
  write: (text: string) => unknown
}

/** Shows the progress of loading: a bar on a terminal, otherwise one log line per 10 %, at most one a second. */
export class LoadProgress {
  readonly #terminal: Terminal
  readonly #log: (line: string) => void
  readonly #now: () => number
  readonly #start: number
  #last: number
  #tenth = 0
  #drawn = false

  constructor (terminal: Terminal, log: (line: string) => void, now: () => number = () => performance.now()) {
    this.#terminal = terminal
    this.#log = log
    this.#now = now
    this.#start = this.#last = now()
  }

  update (bytes: number, total: number): void {
    const now = this.#now()
    const share = total > 0 ? Math.min(1, bytes / total) : 1
    const speed = bytes / Math.max(1e-3, (now - this.#start) / 1000) / 1e9
    const text = `${Math.floor(share * 100)} % of ${(total / 1e9).toFixed(2)} GB, ${speed.toFixed(2)} GB/s`
    if (this.#terminal.isTTY === true) {
      if (this.#drawn && now - this.#last < DRAW_EVERY_MS && share < 1) return
      const full = Math.round(share * WIDTH)
      this.#terminal.write(`\r\x1b[Kloading [${'='.repeat(full)}${' '.repeat(WIDTH - full)}] ${text}`)
      this.#drawn = true
    } else {
      const tenth = Math.floor(share * 10)
      if (tenth === this.#tenth || now - this.#last < LOG_EVERY_MS) return
      this.#tenth = tenth
      this.#log(`loading: ${text}`)
    }
    this.#last = now
  }

  /** Removes the bar. */
  end (): void {
    if (this.#drawn) this.#terminal.write('\r\x1b[K')
    this.#drawn = false
  }
}
