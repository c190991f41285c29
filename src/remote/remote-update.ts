import { randomUUID } from 'node:crypto'
import type { UpdateOptions, WeightUpdate } from '../contract/rollout-engine.ts'
import { requireAgreement } from '../contract/require-agreement.ts'
import { RefitError } from '../errors.ts'
import type { WeightSource, WriteReport } from '../contract/weight-source.ts'
import type { Connection, JsonReply } from './connection.ts'
import { parsed, readAll } from './connection.ts'
import { refusal } from './remote-state.ts'
import type { RemoteState } from './remote-state.ts'
import type { RemoteTransactions } from './remote-transactions.ts'
import { safetensorsBody } from './safetensors-body.ts'

/**
 * An update of a remote engine. It sends the path of a checkpoint on disk, which the engine reads itself; other bytes
 * are uploaded (refit only). On refit the update is its own transaction, because nothing may be generated between the
 * write and the commit with its label.
 */
export class RemoteUpdate implements WeightUpdate {
  readonly #connection: Connection
  readonly #state: RemoteState
  readonly #transactions: RemoteTransactions
  readonly #options: UpdateOptions
  /** The transaction that this update opened. */
  #own: string | null = null
  #report: WriteReport | null = null

  constructor (connection: Connection, state: RemoteState, transactions: RemoteTransactions, options: UpdateOptions) {
    this.#connection = connection
    this.#state = state
    this.#transactions = transactions
    this.#options = options
  }

  async write (source: WeightSource): Promise<WriteReport> {
    const isRefit = this.#state.facts.kind === 'refit'
    if (this.#state.facts.kind === 'vllm') {
      throw new RefitError(
        'UNSUPPORTED',
        'a remote vLLM takes weights through its own transfer engine: call it directly, or a gateway in front of it'
      )
    }
    const path = source.kind === 'stored' ? source.path : undefined
    if (path === undefined && !isRefit) {
      throw new RefitError(
        'UNSUPPORTED',
        `a remote SGLang takes checkpoints on disk, not weights of the kind ${JSON.stringify(source.transport.name)}`
      )
    }
    const { requireAll = false, swap, onRunning } = this.#options
    if (swap === 'demand' && !isRefit) {
      throw new RefitError('UNSUPPORTED', 'swap "demand": a remote SGLang writes weights in place; send swap "auto"', {
        param: 'swap'
      })
    }
    if (onRunning === 'finish_old' && !isRefit) {
      throw new RefitError('UNSUPPORTED', 'on_running "finish_old": a remote SGLang has one set of weights', {
        param: 'on_running'
      })
    }
    const isWhole = requireAll === true || (requireAll === 'alone' && !this.#isInside)
    // A trainer's bucket may be empty, and an upload may not.
    const isEmpty = path === undefined && source.tensors.length === 0
    const body = path === undefined && !isEmpty ? safetensorsBody(source) : null
    if (isRefit && !this.#isInside) {
      // Before it opens a transaction, which would stop the updates of others.
      requireAgreement(this.#options)
      this.#own ??= (await this.#transactions.open({
        owner: `remote engine ${randomUUID()}`,
        ...this.#options.deadlineMs === undefined
          ? {}
          : { deadlineMs: this.#options.deadlineMs },
        ...swap === undefined ? {} : { swap },
        ...onRunning === undefined ? {} : { onRunning }
      }))
        .id
    }
    const id = this.#options.transaction ?? this.#own
    const fields = {
      ...id === null ? {} : { transaction: id },
      ...isWhole ? { allow_missing: false } : {},
      // The remote engine refuses a way that is not the transaction's.
      ...isRefit && swap !== undefined ? { swap } : {},
      ...isRefit && onRunning !== undefined ? { on_running: onRunning } : {},
      ...this.#options.abortAllRequests === true ? { abort_all_requests: true } : {}
    }
    if (isEmpty) {
      this.#report = reportOf(source, {})
      return this.#report
    }
    const reply = path !== undefined
      ? await this.#connection.json('POST', '/update_weights_from_disk', { model_path: path, ...fields }, {
        admin: true
      })
      : await this.#upload(body!, fields)
    this.#state.written()
    if (isRefusal(reply)) throw refusal('the remote update', reply.status, reply.text)
    this.#report = reportOf(source, reply)
    return this.#report
  }

  async commit (
    { version, flushCache, requireAll = false }: { version?: string, flushCache?: boolean, requireAll?: boolean }
  ): Promise<void> {
    if (requireAll && this.#report !== null && this.#report.missingCount > 0) {
      throw new RefitError(
        'WEIGHTS_INCOMPLETE',
        `${this.#report.missingCount} tensors are missing: ${
          this
            .#report
            .missing
            .slice(0, 3)
            .join(', ')
        }`
      )
    }
    if (this.#own !== null) {
      await this.#transactions.commit(this.#own, {
        ...version === undefined ? {} : { version },
        ...flushCache === undefined ? {} : { flushCache }
      })
    } else if (version !== undefined && this.#isInside) {
      this.#transactions.label(this.#options.transaction ?? null, version)
    } else if (version !== undefined) {
      const reply = await this.#connection.json('POST', '/update_weight_version', {
        new_version: version,
        abort_all_requests: false
      }, { admin: true })
      if (isRefusal(reply)) throw refusal('/update_weight_version', reply.status, reply.text)
    }
    this.#own = null
    await this.#state.refresh()
  }

  async abort (reason: string): Promise<void> {
    if (this.#own !== null) await this.#transactions.abort(this.#own, reason.slice(0, 1000)).catch(() => {})
    this.#own = null
    await this.#state.refresh().catch(() => {})
  }

  /** The update belongs to an open transaction: the one in its options, or a trainer's scope. */
  get #isInside (): boolean {
    return this.#options.transaction !== undefined || (this.#own === null && this.#transactions.current?.scope === true)
  }

  async #upload (
    { length, chunks }: { length: number, chunks: AsyncIterable<Uint8Array> },
    fields: Record<string, unknown>
  ): Promise<JsonReply> {
    const query = new URLSearchParams(
      Object.entries(fields).map(([name, value]): [string, string] => [name, String(value)])
    )
    const { statusCode: status, body } = await this.#connection.request({
      method: 'POST',
      path: `/update_weights_from_tensor?${query}`,
      headers: { 'content-type': 'application/octet-stream', 'content-length': String(length) },
      body: chunks as never,
      admin: true
    })
    const text = String(await readAll(body))
    return { status, text, body: parsed(text) }
  }
}

function isRefusal ({ status, body }: JsonReply): boolean {
  return status >= 400 || (body as { success?: unknown } | undefined)?.success === false
}

/** SGLang's reply has no report; its fields get defaults. */
function reportOf (source: WeightSource, { body }: Partial<JsonReply>): WriteReport {
  const { report = {} } = (body ?? {}) as { report?: Record<string, unknown> }
  const ms = { plan: 0, gate: 0, write: 0, verify: 0, total: 0, ...report['ms'] as object | undefined }
  return {
    source: source.transport.name,
    tensors: Number(report['tensors'] ?? source.tensors.length),
    bytes: Number(report['bytes'] ?? 0),
    missing: (report['missing'] ?? []) as string[],
    missingCount: Number(report['missing_count'] ?? 0),
    ignored: (report['ignored'] ?? []) as string[],
    ms,
    gbPerSecond: Number(report['gb_per_second'] ?? 0)
  }
}
