import { messageOf } from '../remote/connection.ts'
import { JsonBody } from './json-body.ts'
import { failureOf } from './replies.ts'
import type { Outcome } from './replies.ts'
import type { Worker } from './worker.ts'

/** The effect of a call on LoRA adapters, and the fields of its body. */
export interface AdapterCall {
  kind: 'load' | 'unload'
  /** The field with the name. */
  name: string
  /** The field with the folder, if the adapter comes from one: engines that join load it from there. */
  folder?: string
}

/** The request that loads an adapter from a folder; null if its tensors came another way. */
type Reload = { path: string, body: Buffer } | null

const MAX_NAMES = 256
/** Longest time of one load into an engine that joins. */
const LOAD_MS = 120_000

/** The LoRA adapters that were loaded through the gateway, and the engines that have them. */
export class FleetAdapters {
  readonly #reloads = new Map<string, Reload>()
  readonly #holders = new Map<string, Set<Worker>>()

  /** Records the outcome of a call. After a load that only some engines took, requests go to those. */
  record (
    { kind, name: field, folder }: AdapterCall,
    request: { path: string, body: Buffer },
    outcomes: readonly Outcome[]
  ): void {
    const json = new JsonBody(request.body)
    const name = json.text(field)
    if (name === undefined) return
    const took = outcomes.filter(outcome => failureOf(outcome) === null).map(({ worker }) => worker)
    if (kind === 'unload') {
      if (took.length > 0) this.#forget(name)
      return
    }
    if (took.length === 0) return
    const isOnDisk = folder !== undefined && json.text(folder) !== undefined
    this.add(name, isOnDisk ? { path: request.path, body: Buffer.from(request.body) } : null, took)
  }

  add (name: string, reload: Reload, holders: readonly Worker[]): void {
    this.#forget(name)
    this.#reloads.set(name, reload)
    this.#holders.set(name, new Set(holders))
    // Some trainers give every version a name of its own and never unload one. Engines forget the oldest, too.
    if (this.#reloads.size > MAX_NAMES) this.#forget(this.#reloads.keys().next().value!)
  }

  /** A test for engines that have the adapters of a request; undefined if it names none that is known. */
  neededBy (body: Buffer): ((worker: Worker) => boolean) | undefined {
    if (this.#reloads.size === 0) return undefined
    const names = namedIn(new JsonBody(body)).filter(name => this.#holders.has(name))
    if (names.length === 0) return undefined
    return worker => names.every(name => this.#holders.get(name)?.has(worker) === true)
  }

  /** A restarted engine has lost its adapters. */
  lost (worker: Worker): void {
    for (const holders of this.#holders.values()) holders.delete(worker)
  }

  /**
   * Loads the adapters that came from folders into an engine that joins. Returns the adapters that it lacks after that,
   * each with the reason. It serves requests for the others.
   */
  async fill (worker: Worker): Promise<string[]> {
    const lacking: string[] = []
    for (const [name, reload] of [...this.#reloads]) {
      const holders = this.#holders.get(name)!
      if (holders.has(worker)) continue
      const failure = reload === null ? 'its tensors came from no folder: send it again' : await load(worker, reload)
      // It may have been unloaded or replaced meanwhile.
      if (this.#reloads.get(name) !== reload) continue
      if (failure === null) holders.add(worker)
      else lacking.push(`${name}: ${failure}`)
    }
    return lacking
  }

  #forget (name: string): void {
    this.#reloads.delete(name)
    this.#holders.delete(name)
  }
}

async function load ({ connection }: Worker, { path, body }: NonNullable<Reload>): Promise<string | null> {
  try {
    const fields = JSON.parse(String(body)) as object
    // It may have the adapter of an earlier load under the name.
    const reply = await connection.json('POST', path, { ...fields, load_inplace: true }, {
      admin: true,
      signal: AbortSignal.timeout(LOAD_MS)
    })
    return reply.status < 400 ? null : messageOf(reply)
  } catch (error) {
    return (error as Error).message
  }
}

/** The names by which a body may mean adapters: `lora_path`, `model`, and what follows a colon in `model`. */
function namedIn (json: JsonBody): string[] {
  const model = json.text('model')
  const paths: unknown[] = [json.get('lora_path')].flat()
  const models = model === undefined ? [] : [model, ...colons(model)]
  return [...paths.filter(name => typeof name === 'string'), ...models]
}

/** The served name may have colons of its own. */
function colons (model: string): string[] {
  const parts = model.split(':')
  return parts.slice(1).map((_, index) => parts.slice(index + 1).join(':'))
}
