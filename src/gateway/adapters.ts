import { messageOf } from '../remote/connection.ts'
import { copyAdapter, LOAD_MS, READ_MS, readAdapter } from './copy-adapter.ts'
import type { HeldVersion } from './copy-adapter.ts'
import { JsonBody } from './json-body.ts'
import { failureOf } from './replies.ts'
import type { Outcome } from './replies.ts'
import type { Worker } from './worker.ts'

/** The effect of a call on LoRA adapters, and the fields of its body. */
export interface AdapterCall {
  kind: 'load' | 'unload'
  /** The field with the name. */
  name: string
  /** The field with the folder, if the adapter comes from one: engines that join load it from there first. */
  folder?: string
}

/** The request that loads an adapter from a folder; null if its tensors came another way. */
type Reload = { path: string, body: Buffer } | null

const MAX_NAMES = 256

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
    const isOnDisk = folder !== undefined && json.text(folder) !== undefined
    const reload = isOnDisk ? { path: request.path, body: Buffer.from(request.body) } : null
    if (kind === 'unload') this.unloaded(name, outcomes)
    else this.loaded(name, reload, outcomes)
  }

  loaded (name: string, reload: Reload, outcomes: readonly Outcome[]): void {
    const holders = tookIt(outcomes)
    if (holders.length === 0) return
    this.#forget(name)
    this.#reloads.set(name, reload)
    this.#holders.set(name, new Set(holders))
    // Some trainers give every version a name of its own and never unload one. Engines forget the oldest, too.
    if (this.#reloads.size > MAX_NAMES) this.#forget(this.#reloads.keys().next().value!)
  }

  unloaded (name: string, outcomes: readonly Outcome[]): void {
    if (tookIt(outcomes).length > 0) this.#forget(name)
  }

  /**
   * Engines unloaded a version when its successor came. One that got it from another engine does not know that it is
   * the version before, so it is unloaded there.
   */
  async replaced (name: string, outcomes: readonly Outcome[]): Promise<void> {
    const left = new Set(this.#holders.get(name))
    this.#forget(name)
    for (const { worker } of outcomes) left.delete(worker)
    await Promise.all([...left].map(async worker => {
      await unload(worker, name)
    }))
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
   * Loads the adapters into an engine that joins: from the folders that they came from, else from an engine that has
   * them. Returns the adapters that it lacks after that, each with the reason. It serves requests for the others.
   */
  async fill (worker: Worker): Promise<string[]> {
    const lacking = new Map<string, string>()
    for (;;) {
      const next = [...this.#holders].find(([name, holders]) => !holders.has(worker) && !lacking.has(name))
      if (next === undefined) return [...lacking].map(([name, failure]) => `${name}: ${failure}`)
      const [name, holders] = next
      const failure = await this.#fillOne(name, this.#reloads.get(name) ?? null, holders, worker)
      const current = this.#holders.get(name)
      if (current === undefined) {
        // It was unloaded, or gave its place to a version of another name, when the engine did not have it yet. The
        // engine may have it now, or soon: a copy that was given up may still end.
        await unload(worker, name)
        // A version that was loaded meanwhile may have been unloaded by that.
        this.#holders.get(name)?.delete(worker)
      } else if (current !== holders) {
        // It was replaced meanwhile, and the engine may have got the new version before the old one.
        current.delete(worker)
      } else if (failure === null) holders.add(worker)
      else lacking.set(name, failure)
    }
  }

  /** Null, or the reason of the failure. Forgets an adapter that no engine has any more. */
  async #fillOne (name: string, reload: Reload, holders: Set<Worker>, worker: Worker): Promise<string | null> {
    const failures: string[] = []
    let peer: { from: Worker, held: HeldVersion } | undefined
    for (const holder of [...holders]) {
      const held = holder.state === 'ready' ? await readAdapter(holder, name) : `${holder.url} is ${holder.state}`
      if (held === null) holders.delete(holder)
      else if (typeof held === 'string') failures.push(held)
      else {
        peer = { from: holder, held }
        break
      }
    }
    if (reload !== null) {
      const failure = await load(worker, reload) ?? await differenceTo(peer?.held, worker, name)
      if (failure === null) return null
      failures.unshift(failure)
    }
    if (peer !== undefined) {
      const failure = await copyAdapter(name, peer.held, peer.from, worker)
      if (failure === null) return null
      failures.push(failure)
    } else if (failures.length === 0) failures.push('no engine has it any more: send it again')
    return failures.join('; ')
  }

  #forget (name: string): void {
    this.#reloads.delete(name)
    this.#holders.delete(name)
  }
}

function tookIt (outcomes: readonly Outcome[]): Worker[] {
  return outcomes.filter(outcome => failureOf(outcome) === null).map(({ worker }) => worker)
}

/** A trainer may have saved another version in the folder meanwhile. */
async function differenceTo (held: HeldVersion | undefined, worker: Worker, name: string): Promise<string | null> {
  if (held === undefined || worker.facts?.kind !== 'refit') return null
  const loaded = await readAdapter(worker, name)
  if (typeof loaded === 'string') return loaded
  return loaded?.digest === held.digest ? null : 'its folder has another version by now'
}

/** An engine that does not answer is left out by the next health check. */
async function unload ({ connection }: Worker, name: string): Promise<void> {
  const options = { admin: true, signal: AbortSignal.timeout(READ_MS) }
  await connection.json('DELETE', `/adapters/${encodeURIComponent(name)}`, undefined, options).catch(() => {})
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
