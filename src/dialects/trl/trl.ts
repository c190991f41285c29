import { setTimeout as sleep } from 'node:timers/promises'
import { RefitError } from '../../errors.ts'
import type { UpdatesContext } from '../../http/context.ts'
import { runUpdate } from '../../updates/run-update.ts'
import type { DistributedSource } from '../../sources/distributed/distributed.ts'
import { StatelessBarrier } from '../../rendezvous/stateless-barrier.ts'
import { CallJoiner } from '../../weights/call-joiner.ts'
import type { WeightSource } from '../../contract/weight-source.ts'

export interface Communicator {
  host: string
  port: number
  gpuUuid: string | undefined
  backend: string
}
export interface NamedParameter {
  name: string
  dtype: string
  shape: number[]
}

const GROUP = 'trl'
/** TRL's client joins only after the reply; an error that shows within this time is still in the reply. */
const SHOW_MS = 100
const CLOSE_MS = 2000

/**
 * Weight updates of TRL's `vllm-serve`, with one parameter in each request. This engine has rank 0 and the store; TRL's
 * client is the last rank and broadcasts after it has the reply. So the announced parameter is checked before the
 * reply, and a failure after it is reported at the next call.
 */
export class TrlWeights {
  readonly #context: UpdatesContext
  /** Resolves when the communicator is ready. */
  #joining: Promise<void> | null = null
  #barrier: StatelessBarrier | null = null
  /** Resolves after all parameters so far have been received. */
  #tail: Promise<void> = Promise.resolve()
  /** Requests without a reply so far. */
  readonly #unanswered = new CallJoiner<void>()
  #turn: Promise<void> = Promise.resolve()
  /** The parameter with a reply whose bytes have not come; an equal request is a client's retry. */
  #expected: string | null = null
  #failure: RefitError | null = null

  constructor (context: UpdatesContext) {
    this.#context = context
  }

  async init ({ host, port, gpuUuid, backend }: Communicator): Promise<void> {
    const { engine, groups } = this.#context
    const { gpus, ranks } = engine.info
    if (gpuUuid !== undefined && gpus.some(({ uuid }) => bare(uuid) === bare(gpuUuid))) {
      throw new RefitError(
        'GROUP_REFUSED',
        `client_device_uuid: this engine computes on ${gpuUuid}, and NCCL does not join two ranks on one GPU; ` +
          'train on another one',
        { param: 'client_device_uuid' }
      )
    }
    this.#failure = null
    this.#expected = null
    this.#barrier = null
    const spec = {
      name: GROUP,
      backend,
      form: 'vllm',
      address: host,
      port,
      rankOffset: 0,
      hosts: true,
      worldSize: ranks + 1,
      root: ranks
    } as const
    const joining = this.#joining = groups.init(spec, { renew: true }).then(() => {
      this.#barrier = new StatelessBarrier(groups.get(GROUP).store, ranks)
    })
    joining.catch((error: unknown) => {
      if (this.#joining === joining) this.#failed('the communicator could not be made', error)
    })
    await Promise.race([joining, sleep(SHOW_MS)]).catch((error: unknown) => {
      this.#failure = null
      throw error
    })
  }

  /** Resolves when the client may broadcast. */
  async update (parameter: NamedParameter): Promise<void> {
    this.#throwFailure()
    if (this.#joining === null) {
      throw new RefitError('CONFLICT', 'there is no communicator: call /init_communicator/ first')
    }
    const key = JSON.stringify(parameter)
    if (this.#expected === key) return
    const joining = this.#joining
    await this.#unanswered.join(key, async () => {
      // One parameter after another, even if a client cancelled a request and sends the next one.
      const turn = this.#turn.then(async () => {
        await joining.catch(() => {})
        await this.#tail
        this.#throwFailure()
        await this.#begin(parameter, key)
      })
      this.#turn = turn.catch(() => {})
      await turn
    })
  }

  /** Resolves after all parameters so far; throws the failure of one of them. */
  async settle (): Promise<void> {
    await this.#tail
    this.#throwFailure()
  }

  async close (): Promise<void> {
    if (this.#expected === null) await Promise.race([this.#tail, sleep(CLOSE_MS)])
    const failure = this.#failure
    this.#failure = null
    this.#joining = null
    this.#barrier = null
    await this.#context.groups.destroy(GROUP)
    if (failure !== null) throw failure
  }

  async #begin ({ name, dtype, shape }: NamedParameter, key: string): Promise<void> {
    let allow: () => void = () => {}
    const allowed = new Promise<void>(resolve => {
      allow = resolve
    })
    // TRL resets the prefix cache itself after the last parameter.
    const written = runUpdate(this.#context, { flushCache: false }, async write => {
      const source = await this.#context.distributed.open({
        names: [name],
        dtypes: [dtype],
        shapes: [shape],
        groupName: GROUP,
        loadFormat: null,
        waitsForReply: true
      })
      const permitted = withPermission(source, () => {
        this.#expected = key
        allow()
      })
      return await write(permitted)
    })
    this.#tail = written
      .catch((error: unknown) => {
        if (this.#expected === key) this.#failed(`parameter "${name}" could not be received`, error)
      })
      .then(async () => {
        await this.#meet()
      })
    await Promise.race([allowed, written])
  }

  /** Meets the client at its barrier; it continues when all ranks are there. */
  async #meet (): Promise<void> {
    if (this.#expected === null) return
    this.#expected = null
    const barrier = this.#barrier
    try {
      const group = this.#context.groups.get(GROUP)
      await barrier?.pass({ timeoutMs: group.timeoutMs })
    } catch (error) {
      if (this.#barrier === barrier) this.#failed('the client did not reach the barrier after a parameter', error)
    }
  }

  #failed (what: string, error: unknown): void {
    const { message = String(error), code = 'INTERNAL' } = error as Partial<RefitError>
    this.#failure ??= new RefitError('BROADCAST_SPENT', `${what}, after the reply: ${code}: ${message}`, {
      cause: error
    })
  }

  /** Throws the last failure, once. */
  #throwFailure (): void {
    const failure = this.#failure
    this.#failure = null
    if (failure !== null) throw failure
  }
}

/**
 * Returns the same source, which calls `allow` when everything is checked and the broadcast can begin. If the source is
 * refused before, the client does not broadcast.
 */
function withPermission (source: DistributedSource, allow: () => void): WeightSource {
  let isAllowed = false
  const { stream } = source
  return {
    ...source,
    stream: {
      ready: async () => {
        isAllowed = true
        allow()
        await stream.ready()
      },
      next: async () => await stream.next(),
      drop: async hurry => {
        await stream.drop?.(hurry)
      }
    },
    close: async () => {
      if (isAllowed) await source.close()
      else source.withdraw()
    }
  }
}

function bare (uuid: string): string {
  return uuid.toLowerCase().replace(/^gpu-/, '')
}
