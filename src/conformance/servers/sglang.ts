import type { HttpTarget, Reply } from '../http-target.ts'
import { Broken, NotOffered } from '../promise.ts'
import type { Answer, BroadcastLists, GenerateOptions, GroupFields, PauseMode, Server, VersionSpan } from './server.ts'

const PAUSE_MODES: readonly PauseMode[] = [
  { name: 'abort', effect: 'abort' },
  { name: 'retract', effect: 'recompute' },
  { name: 'in_place', effect: 'freeze' }
]

/** SGLang's routes, which refit has too. */
export class SglangServer implements Server {
  readonly kind = 'sglang'
  readonly pauseModes = PAUSE_MODES
  readonly target: HttpTarget

  constructor (target: HttpTarget) {
    this.target = target
  }

  async ranks (): Promise<number> {
    const { body } = await this.target.get('/server_info')
    return Number(body?.tp_size ?? 1) * Number(body?.pp_size ?? 1)
  }

  async modelPath (): Promise<string | null> {
    const { ok, body } = await this.target.get('/model_info')
    return ok && typeof body.model_path === 'string' ? body.model_path : null
  }

  async label (): Promise<string | null> {
    const { ok, body } = await this.target.get('/model_info')
    return ok && typeof body.weight_version === 'string' ? body.weight_version : null
  }

  async setLabel (label: string): Promise<Reply> {
    return await this.target.post('/update_weight_version', { new_version: label, abort_all_requests: false })
  }

  async score (ids: readonly number[]): Promise<number[]> {
    const reply = await this.target.post('/generate', { ...toBody(ids, { tokens: 1 }), logprob_start_len: 0 })
    const scores = reply.body?.meta_info?.input_token_logprobs
    if (!reply.ok || !Array.isArray(scores)) throw new Broken(`POST /generate answered ${reply.text}`)
    return scores.slice(1).map(([logprob]: [number]) => logprob)
  }

  async tryGenerate (ids: readonly number[], options: GenerateOptions): Promise<Reply> {
    return await this.target.post('/generate', toBody(ids, options), options)
  }

  async generate (ids: readonly number[], options: GenerateOptions): Promise<Answer> {
    const reply = await this.tryGenerate(ids, options)
    if (!reply.ok) throw new Broken(`POST /generate answered ${reply.text}`)
    return toAnswer(reply.body)
  }

  async pause (mode: string): Promise<Reply> {
    return await this.target.post('/pause_generation', { mode })
  }

  async resume (): Promise<Reply> {
    return await this.target.post('/continue_generation', {})
  }

  async health (timeoutMs?: number): Promise<Reply> {
    return await this.target.get('/health', timeoutMs === undefined ? {} : { timeoutMs })
  }

  async releaseMemory (): Promise<Reply> {
    return await this.target.post('/release_memory_occupation', {})
  }

  async resumeMemory (): Promise<Reply> {
    return await this.target.post('/resume_memory_occupation', {})
  }

  async digest (): Promise<string | null> {
    const { ok, body } = await this.target.post('/weights_checker', { action: 'checksum' })
    return ok && typeof body?.per_engine_checksum === 'string' ? body.per_engine_checksum : null
  }

  async readBack (name: string, rows: number): Promise<number[] | null> {
    const { ok, body } = await this.target.post('/get_weights_by_name', { name, truncate_size: rows })
    return ok && Array.isArray(body) ? body.flat(8) : null
  }

  async initGroup (fields: GroupFields, timeoutMs?: number): Promise<Reply> {
    const { address, port, worldSize, name } = fields
    const body = {
      master_address: address,
      master_port: port,
      rank_offset: 1,
      world_size: worldSize,
      group_name: name,
      backend: 'gloo'
    }
    return await this.target.post('/init_weights_update_group', body, timeoutMs === undefined ? {} : { timeoutMs })
  }

  async destroyGroup (name: string): Promise<Reply> {
    return await this.target.post('/destroy_weights_update_group', { group_name: name })
  }

  async receive (group: string, lists: BroadcastLists, label: string | undefined): Promise<Reply> {
    return await this.target.post('/update_weights_from_distributed', {
      ...lists,
      group_name: group,
      ...versionField(label)
    })
  }

  async loadFolder (path: string, label: string | undefined): Promise<Reply> {
    return await this.target.post('/update_weights_from_disk', { model_path: path, ...versionField(label) })
  }

  async giveUp (): Promise<void> {}
}

/** Only a label that is given is sent. */
export function versionField (label: string | undefined): { weight_version?: string } {
  return label === undefined ? {} : { weight_version: label }
}

function toBody (ids: readonly number[], { tokens }: GenerateOptions): object {
  return {
    input_ids: ids,
    sampling_params: { max_new_tokens: tokens, temperature: 0, ignore_eos: true },
    return_logprob: true
  }
}

function toAnswer (output: any): Answer {
  const info = output?.meta_info
  const scored: Array<[number, number]> = info?.output_token_logprobs ?? []
  const finish = info?.finish_reason?.type ?? ''
  const tokens = scored.map(([, id]) => id)
  const spans: VersionSpan[] | undefined = info?.weight_versions
  const whole = typeof info?.weight_version === 'string'
    ? [{ version: info.weight_version, start: 0, end: tokens.length }]
    : null
  if (info === undefined) throw new NotOffered('answers of /generate have no meta_info')
  return { tokens, logprobs: scored.map(([logprob]) => logprob), versions: spans ?? whole, finish }
}
