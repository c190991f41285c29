interface Row {
  family: string
  what: string
  checks: number
  failed: number
}

const MOST_SHOWN = 40

/** Counts checks by family and kind, and keeps the first failures with the way to repeat them. */
export class Report {
  readonly #rows = new Map<string, Row>()
  readonly #failures: string[] = []
  /** Failures beyond those that are kept. */
  #more = 0
  /** The family and the seed of the round that runs. */
  now = { family: 'start', seed: 0 }

  get checks (): number {
    return [...this.#rows.values()].reduce((sum, { checks }) => sum + checks, 0)
  }

  get failed (): number {
    return [...this.#rows.values()].reduce((sum, { failed }) => sum + failed, 0)
  }

  /** `shows` names the request and its answer; it is called for failures only. */
  check (what: string, isGood: boolean, shows: () => string): void {
    const { family, seed } = this.now
    const key = `${family}\n${what}`
    const row = this.#rows.get(key) ?? { family, what, checks: 0, failed: 0 }
    this.#rows.set(key, row)
    row.checks++
    if (isGood) return
    row.failed++
    if (this.#failures.length >= MOST_SHOWN) {
      this.#more++
      return
    }
    const text = `FAILED ${family}: ${what}\n    ${shows().slice(0, 1500)}\n` +
      `    again: npm run test:hostile -- --only ${family} --seed ${seed}`
    this.#failures.push(text)
    console.log(text.slice(0, 300))
  }

  table (): string {
    const lines = ['', `${'family'.padEnd(10)}${'checks'.padStart(8)}${'failed'.padStart(8)}  what was checked`]
    for (const { family, what, checks, failed } of this.#rows.values()) {
      lines.push(`${family.padEnd(10)}${String(checks).padStart(8)}${String(failed).padStart(8)}  ${what}`)
    }
    lines.push(`${'all'.padEnd(10)}${String(this.checks).padStart(8)}${String(this.failed).padStart(8)}`)
    if (this.#failures.length > 0) lines.push('', ...this.#failures)
    if (this.#more > 0) lines.push(`and ${this.#more} more failures`)
    return lines.join('\n')
  }
}
