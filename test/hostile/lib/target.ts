import { spawn } from 'node:child_process'
import type { ChildProcess } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import { Pool } from 'undici'

const MAIN = fileURLToPath(new URL('../../../src/main.js', import.meta.url))
const LAST_LINES = 30
/** Linux counts in these, whatever the kernel's own clock is. */
const TICKS_A_SECOND = 100
const PATIENCE_MS = 120_000

export interface Reply {
  /** 0: the connection ended without a reply. */
  status: number
  text: string
  ms: number
}

export interface CallOptions {
  method?: string
  headers?: Record<string, string | string[]>
  /** JSON, unless it is text or bytes. */
  body?: unknown
  /** After it the client leaves; the reply is then status 0. */
  timeoutMs?: number
}

/** A process of refit under attack. */
export class Target {
  readonly name: string
  readonly url: string
  readonly port: number
  readonly child: ChildProcess
  readonly #lines: string[]
  readonly #pool: Pool

  private constructor (name: string, url: string, child: ChildProcess, lines: string[]) {
    this.name = name
    this.url = url
    this.port = Number(new URL(url).port)
    this.child = child
    this.#lines = lines
    this.#pool = new Pool(url, { connections: 32, headersTimeout: 0, bodyTimeout: 0 })
  }

  /** Starts `refit ARGS`, with a small heap so that too much memory ends it, and waits until it listens. */
  static async start (name: string, args: readonly string[], heapMiB = 512): Promise<Target> {
    const child = spawn(process.execPath, [`--max-old-space-size=${heapMiB}`, MAIN, ...args, '--port', '0'], {
      stdio: ['ignore', 'pipe', 'pipe'],
      env: { PATH: process.env.PATH, HOME: '/nonexistent' }
    })
    const lines: string[] = []
    const keep = (line: string): void => {
      lines.push(line)
      if (lines.length > LAST_LINES) lines.shift()
    }
    createInterface({ input: child.stderr }).on('line', keep)
    const url = await new Promise<string>((resolve, reject) => {
      createInterface({ input: child.stdout }).on('line', line => {
        keep(line)
        const ready = /is ready on (http:\/\/[\w.:]+)/.exec(line)
        if (ready !== null) resolve(ready[1]!)
      })
      child.once('exit', code => reject(new Error(`${name} ended with ${code}:\n${lines.join('\n')}`)))
    })
    return new Target(name, url, child, lines)
  }

  get isAlive (): boolean {
    return this.child.exitCode === null && this.child.signalCode === null
  }

  get log (): string {
    return this.#lines.join('\n')
  }

  /** Sends a request as it is: its path is not normalised. */
  async call (path: string, options: CallOptions = {}): Promise<Reply> {
    const began = performance.now()
    const { body, timeoutMs = PATIENCE_MS } = options
    const isJson = body !== undefined && typeof body !== 'string' && !(body instanceof Uint8Array)
    const patience = new AbortController()
    const timer = setTimeout(() => patience.abort(new Error(`no reply in ${timeoutMs} ms`)), timeoutMs)
    try {
      const reply = await this.#pool.request({
        path,
        method: (options.method ?? (body === undefined ? 'GET' : 'POST')) as 'GET',
        headers: { ...isJson ? { 'content-type': 'application/json' } : {}, ...options.headers },
        body: isJson ? JSON.stringify(body) : (body as string | Uint8Array | undefined) ?? null,
        signal: patience.signal
      })
      return { status: reply.statusCode, text: await reply.body.text(), ms: performance.now() - began }
    } catch (error) {
      return { status: 0, text: String(error), ms: performance.now() - began }
    } finally {
      clearTimeout(timer)
    }
  }

  /** Resident memory in MiB, now and at its highest. */
  memory (): { now: number, peak: number } {
    const status = readFileSync(`/proc/${this.child.pid}/status`, 'utf8')
    const read = (name: string): number => Number(new RegExp(`^${name}:\\s+(\\d+)`, 'm').exec(status)?.[1]) / 1024
    return { now: read('VmRSS'), peak: read('VmHWM') }
  }

  /** Time that its threads have computed. */
  cpuSeconds (): number {
    const fields = readFileSync(`/proc/${this.child.pid}/stat`, 'utf8').replace(/^.*\) /, '').split(' ')
    return (Number(fields[11]) + Number(fields[12])) / TICKS_A_SECOND
  }

  async stop (): Promise<void> {
    await this.#pool.destroy().catch(() => {})
    if (!this.isAlive) return
    this.child.kill('SIGKILL')
    await once(this.child, 'exit')
  }
}
