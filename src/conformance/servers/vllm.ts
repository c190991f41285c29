import type { HttpTarget, Reply } from '../http-target.ts'
import { Broken, Refused } from '../promise.ts'
import type { Answer, BroadcastLists, GenerateOptions, GroupFields, PauseMode, Server, VersionSpan } from './server.ts'
import { versionField } from './sglang.ts'

const PAUSE_MODES: readonly PauseMode[] = [
  { name: 'abort', effect: 'abort' },
  { name: 'wait', effect: 'finish' },
  { name: 'keep', effect: 'freeze' }
]
const GENERATE = '/inference/v1/generate'

/** vLLM's routes (VLLM_SERVER_DEV_MODE=1), which refit has too. An update is start, update_weights, finish. */
export class VllmServer implements Server {
  readonly kind = 'vllm'
  readonly pauseModes = PAUSE_MODES
  readonly target: HttpTarget

  constructor (target: HttpTarget) {
    this.target = target
  }

  async ranks (): Promise<number> {
    const { body } = await this.target.get('/get_world_size')
    return Number(body?.world_size ?? 1)
  }

  async modelPath (): Promise<string | null> {
    return null
  }

  async label (): Promise<string | null> {
    const { ok, body } = await this.target.get('/weight_info')
    return ok && typeof body?.weight_version === 'string' ? body.weight_version : null
  }

  async setLabel (label: string): Promise<Reply> {
    return await this.target.post('/update_weight_version', { new_version: label, abort_all_requests: false })
  }

  async score (ids: readonly number[]): Promise<number[]> {
    const reply = await this.target.post(GENERATE, toBody(ids, { tokens: 1 }, { prompt_logprobs: 0 }))
    const scores = reply.body?.prompt_logprobs
    if (!reply.ok || !Array.isArray(scores)) throw new Broken(`POST ${GENERATE} answered ${reply.text}`)
    return scores.slice(1).map((entry: Record<string, { logprob: number }>, i: number) => {
      return entry[String(ids[i + 1])]!.logprob
    })
  }

  async tryGenerate (ids: readonly number[], options: GenerateOptions): Promise<Reply> {
    return await this.target.post(GENERATE, toBody(ids, options), options)
  }

  async generate (ids: readonly number[], options: GenerateOptions): Promise<Answer> {
    const reply = await this.tryGenerate(ids, options)
    if (!reply.ok) throw new Refused(reply.status, `POST ${GENERATE} answered ${reply.text}`)
    return toAnswer(reply.body)
  }

  async pause (mode: string): Promise<Reply> {
    return await this.target.post(`/pause?mode=${encodeURIComponent(mode)}`, {})
  }

  async resume (): Promise<Reply> {
    return await this.target.post('/resume', {})
  }

  async health (timeoutMs?: number): Promise<Reply> {
    return await this.target.get('/health', timeoutMs === undefined ? {} : { timeoutMs })
  }

  async releaseMemory (): Promise<Reply> {
    return await this.target.post('/sleep?level=2', {})
  }

  async resumeMemory (): Promise<Reply> {
    return await this.target.post('/wake_up', {})
  }

  async digest (): Promise<string | null> {
    const { ok, body } = await this.target.post('/weight_checker', { action: 'checksum' })
    return ok && typeof body?.checksums === 'object' ? JSON.stringify(Object.entries(body.checksums).sort()) : null
  }

  async readBack (): Promise<number[] | null> {
    return null
  }

  async initGroup ({ address, port, worldSize, name }: GroupFields, timeoutMs?: number): Promise<Reply> {
    const info = {
      master_address: address,
      master_port: port,
      rank_offset: 1,
      world_size: worldSize,
      backend: 'gloo',
      group_name: name
    }
    const options = timeoutMs === undefined ? {} : { timeoutMs }
    return await this.target.post('/init_weight_transfer_engine', { init_info: info }, options)
  }

  async destroyGroup (): Promise<Reply> {
    return await this.target.post('/shutdown_weight_transfer_engine', {})
  }

  async receive (_group: string, { dtypes, ...lists }: BroadcastLists, label: string | undefined): Promise<Reply> {
    return await this.#update({ ...lists, dtype_names: dtypes }, label)
  }

  async loadFolder (path: string, label: string | undefined): Promise<Reply> {
    return await this.#update({ path }, label)
  }

  /** A finish ends an open update, unless writes of it failed. Then a start aborts it and begins a new one. */
  async giveUp (): Promise<void> {
    const finished = await this.target.post('/finish_weight_update', {})
    if (finished.ok) return
    await this.target.post('/start_weight_update', { is_checkpoint_format: true })
    await this.target.post('/finish_weight_update', {})
  }

  async #update (info: object, label: string | undefined): Promise<Reply> {
    const started = await this.target.post('/start_weight_update', { is_checkpoint_format: true })
    if (!started.ok) return started
    const updated = await this.target.post('/update_weights', { update_info: info })
    if (!updated.ok) {
      await this.giveUp()
      return updated
    }
    const finished = await this.target.post('/finish_weight_update', versionField(label))
    return { ...finished, body: { ...updated.body, ...finished.body } }
  }
}

function toBody (ids: readonly number[], { tokens }: GenerateOptions, more: object = {}): object {
  return {
    token_ids: ids,
    sampling_params: { max_tokens: tokens, temperature: 0, ignore_eos: true, logprobs: 0, ...more }
  }
}

function toAnswer (output: any): Answer {
  const choice = output?.choices?.[0]
  const content: Array<{ logprob: number }> = choice?.logprobs?.content ?? []
  const versions: VersionSpan[] | undefined = choice?.weight_versions
  return {
    tokens: choice?.token_ids ?? [],
    logprobs: content.map(({ logprob }) => logprob),
    versions: versions ?? null,
    finish: choice?.finish_reason ?? ''
  }
}
