import { lookup } from 'node:dns/promises'
import { isIP } from 'node:net'
import { ClientError } from '../client/client-error.ts'
import { RefitError } from '../errors.ts'
import type { ErrorCode } from '../errors.ts'
import { Connection } from '../remote/connection.ts'
import type { JsonReply } from '../remote/connection.ts'
import type { FleetInfo } from './fleet-info.ts'

/** The body of /init_weights_send_group_for_remote_instance: SGLang's fields first, then refit's own. */
export interface SendGroupRequest {
  master_address: string
  ports: string
  group_rank: number
  world_size: number
  group_name: string
  backend: string
  layout: string
  receiver_hosts: boolean
  barrier: boolean
  piece_bytes: number
  timeout: number
}

/** The names of the options that hold the peer's address and key, for messages. */
export interface PeerOptionNames {
  url: string
  key: string
}

/** The options of an engine that starts. */
export const LOAD_FROM: PeerOptionNames = { url: '--load-from', key: '--load-from-key (REFIT_LOAD_FROM_KEY)' }

export interface SendReply {
  weight_version: string
  bytes: number
  ms: number
  checksums: Record<string, string>
}

const INFO = '/remote_instance_weights_info'
const INIT = '/init_weights_send_group_for_remote_instance'
const SEND = '/send_weights_to_remote_instance'
const ANSWER_MS = 20_000
/** Codes of a peer that may succeed later. */
const LATER: ReadonlySet<string> = new Set<ErrorCode>([
  'ENGINE_TORN',
  'ENGINE_ASLEEP',
  'ENGINE_CLOSED',
  'TRANSACTION_OPEN',
  'CONFLICT',
  'DEADLINE'
])

/** HTTP calls of the engine that this one loads from. */
export class Peer {
  readonly url: string
  readonly #hostname: string
  readonly #connection: Connection
  readonly #names: PeerOptionNames

  /** Throws CONFIG for an invalid URL. `key`: the peer's admin key, or its API key if it has no other. */
  constructor (url: string, key?: string, names = LOAD_FROM) {
    const parsed = URL.canParse(url) ? new URL(url) : undefined
    if (parsed === undefined || !['http:', 'https:'].includes(parsed.protocol)) {
      throw new RefitError(
        'CONFIG',
        `${names.url}: expected the URL of a refit server, such as http://10.0.0.7:30000, got ${
          JSON.stringify(url.slice(0, 200))
        }`,
        { param: names.url }
      )
    }
    if (parsed.username !== '' || parsed.password !== '') {
      throw new RefitError('CONFIG', `${names.url}: keys do not belong in the URL; use ${names.key}`, {
        param: names.url
      })
    }
    this.#names = names
    this.#hostname = parsed.hostname.replace(/^\[(.*)\]$/, '$1')
    this.url = parsed.origin + parsed.pathname.replace(/\/+$/, '')
    this.#connection = new Connection(this.url, { apiKey: key })
  }

  /** Its IP address, from which this machine's own address towards it is found. */
  async address (): Promise<string> {
    return isIP(this.#hostname) !== 0 ? this.#hostname : (await lookup(this.#hostname)).address
  }

  async info (): Promise<FleetInfo> {
    const info = await this.#call('GET', INFO, undefined, AbortSignal.timeout(ANSWER_MS)) as FleetInfo | null
    if (info?.server !== 'refit') throw this.#noServer('its reply is not that of a refit server')
    return info
  }

  async init (body: SendGroupRequest, signal: AbortSignal): Promise<void> {
    await this.#call('POST', INIT, body, signal)
  }

  async send (
    body: Pick<SendGroupRequest, 'master_address' | 'ports' | 'group_name'>,
    signal: AbortSignal
  ): Promise<SendReply> {
    return await this.#call('POST', SEND, body, signal) as SendReply
  }

  async close (): Promise<void> {
    await this.#connection.close()
  }

  async #call (method: 'GET' | 'POST', path: string, body: unknown, signal: AbortSignal): Promise<unknown> {
    let reply: JsonReply
    try {
      reply = await this.#connection.json(method, path, body, { signal })
    } catch (error) {
      if (signal.aborted && signal.reason instanceof RefitError) throw signal.reason
      const what = signal.aborted
        ? `it did not answer ${path} within ${ANSWER_MS / 1000} s`
        : `${path}: ${(error as Error).message}`
      throw new RefitError(
        'ENGINE_FAILED',
        method === 'GET'
          ? `no refit server answers at ${this.url} (${what})`
          : `the connection to ${this.url} broke (${what})`,
        { cause: error }
      )
    }
    if (reply.status !== 200) throw this.#refusal(reply.status, ClientError.of(reply.status, reply.text), path)
    if (reply.body === undefined) throw this.#noServer(`its reply to ${path} is not JSON`)
    return reply.body
  }

  #refusal (status: number, error: ClientError, path: string): RefitError {
    if (status === 401 || status === 403) {
      const code = error.code === 'MASTER_REFUSED' ? 'MASTER_REFUSED' : 'CONFIG'
      const advice = code === 'CONFIG'
        ? `; ${this.#names.key} must be its admin key, or its API key if it has no other`
        : ''
      return new RefitError(code, `${this.url} refuses: ${error.message}${advice}`, { cause: error })
    }
    if (error.code !== undefined && LATER.has(error.code)) {
      return new RefitError(
        error.code as ErrorCode,
        error.message,
        { cause: error }
      )
    }
    if (status === 404 && path === INFO) return this.#noServer(`it has no ${path}`, error)
    // The status of a server that starts or ends, or of a proxy in front of it.
    if (status === 503 || status === 502) {
      return new RefitError('ENGINE_CLOSED', `it answered ${status}: ${error.message}`, { cause: error })
    }
    return new RefitError('ENGINE_FAILED', `${this.url} answered ${status} to ${path}: ${error.message}`, {
      cause: error
    })
  }

  #noServer (what: string, cause?: unknown): RefitError {
    return new RefitError(
      'ENGINE_FAILED',
      `${this.url} cannot send weights to this engine: ${what}. ` +
        `${this.#names.url} takes the URL of a refit server of the same version`,
      cause === undefined ? {} : { cause }
    )
  }
}

/** True if the peer replied that the call may succeed later. Refusals by this engine itself do not count. */
export function isLater (error: unknown): error is RefitError {
  return error instanceof RefitError && LATER.has(error.code) && error.cause instanceof ClientError
}
