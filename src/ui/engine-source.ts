import type { GenerationContext } from '../http/context.ts'
import { engineState } from '../http/engine-state.ts'
import { LATENCY_EDGES } from '../http/latency-counts.ts'
import { toLoggedUpdate } from '../http/updates/update-status.ts'
import type { FeedSource } from './feed.ts'
import type { History } from './history.ts'
import { runningRequests } from './running-requests.ts'

const ADAPTERS = 50
/** Weight versions whose differences from a trainer are shown. */
const TRUTHS = 4

export interface PageOptions {
  /** Show prompts and outputs of running requests (default false). */
  prompts?: boolean | undefined
}

/** The frames about one engine. */
export class EngineSource implements FeedSource {
  readonly #context: GenerationContext
  readonly #history: Pick<History, 'rows'>
  readonly #prompts: boolean
  /** Revision of the updates in the last tick. */
  #revision: number

  constructor (context: GenerationContext, history: Pick<History, 'rows'>, { prompts = false }: PageOptions) {
    this.#context = context
    this.#history = history
    this.#prompts = prompts
    this.#revision = context.updates.revision
  }

  hello (): object {
    return { ...this.#server(), history: this.#history.rows, state: this.#state(), updates: this.#updates(0) }
  }

  tick (): object {
    const after = this.#revision
    const updates = this.#updates(after)
    this.#revision = this.#context.updates.revision
    return { state: this.#state(), updates }
  }

  /** For a gateway, which reads only the updates after the last revision that it knows. */
  snapshot (after: number): object {
    const updates = this.#updates(after)
    return { ...this.#server(), state: this.#state(), updates, revision: this.#context.updates.revision }
  }

  /** Facts that do not change. */
  #server (): object {
    const { engine: { info }, version, startedAt } = this.#context
    return {
      kind: 'engine',
      server: {
        version,
        started_at: startedAt,
        model: info.servedModelName,
        architecture: info.architecture,
        device: info.device,
        gpus: info.gpus.map(({ name }) => name),
        isa: info.isa,
        ranks: info.ranks,
        threads: info.threads,
        dtype: info.dtype,
        weight_bytes: info.weightBytes,
        kv_tokens: info.kvTokens,
        context_length: info.contextLength,
        max_running_requests: info.maxRunningRequests,
        takes_text: this.#context.tokenizer !== null,
        shows_prompts: this.#prompts
      },
      latency_edges: LATENCY_EDGES
    }
  }

  #updates (after: number): object[] {
    const now = performance.now()
    return this.#context.updates.list(after).map(entry => toLoggedUpdate(entry, now))
  }

  #state (): object {
    const { engine, metrics, groups } = this.#context
    const { stats, transactions: { current } } = engine
    const adapters = engine.adapters?.list()
    return {
      at: Date.now(),
      ...engineState(engine),
      epoch: engine.epoch,
      running: stats.running,
      queued: stats.queued,
      kv: { used: stats.usedTokens, cached: stats.cachedTokens, total: stats.totalTokens },
      tokens_per_second: stats.tokensPerSecond,
      prompt_tokens: stats.promptTokens,
      generation_tokens: stats.generationTokens,
      retractions: stats.retractions,
      steps: stats.steps,
      step_ms: stats.stepMs,
      latency: metrics.gaps.counts,
      ...runningRequests(this.#context, this.#prompts),
      groups: groups.list.map(({ name, backend, state, ranks, worldSize, error }) => ({
        name,
        backend,
        state,
        ranks,
        world_size: worldSize,
        error
      })),
      transaction: current === null ? null : {
        id: current.id,
        owner: current.owner,
        writing: current.writing,
        version: current.version,
        writes: current.writes,
        bytes: current.bytes,
        written: current.written,
        expected: current.expected,
        failed: current.failedCount,
        seconds_left: current.secondsLeft ?? 0
      },
      adapters: adapters?.slice(0, ADAPTERS).map(({ name, version, rank, resident, pinned, requests }) => ({
        name,
        version,
        rank,
        resident,
        pinned,
        requests
      })) ?? null,
      adapters_count: adapters?.length ?? 0,
      truth: this.#truth()
    }
  }

  /** Null until a trainer has sent logprobs. */
  #truth (): object | null {
    const { truth, truthWarn } = this.#context
    if (truth.samples === 0) return null
    const versions = truth.versions.slice(-TRUTHS).reverse()
    return { samples: truth.samples, warnings: truth.warnings, warn: truthWarn, versions }
  }
}
