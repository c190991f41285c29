import { setTimeout as sleep } from 'node:timers/promises'
import { RefitError } from '../../errors.ts'
import type { RouteContext } from '../../http/context.ts'
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
/** TRL comes once it has been answered, and not before: this long what is wrong at once may take to show. */
const SHOW_MS = 100
const CLOSE_MS = 2000

/**
 * The weights of TRL's `vllm-serve`, one parameter a request: this engine has rank 0 and the store, TRL's client is the last rank and
 * sends once it has been answered. So what a request announces is checked before the answer; what fails behind it is told at the next call.
 */
export class TrlWeights {
  readonly #context: RouteContext
  /** Until the communicator stands. */
  #joining: Promise<void> | null = null
  #barrier: StatelessBarrier | null = null
  /** Of parameters whose bytes have come, and of those that are to come. */
  #tail: Promise<void> = Promise.resolve()
  /** Requests that have not been answered. */
  readonly #asking = new CallJoiner<void>()
  #turn: Promise<void> = Promise.resolve()
  /** What has been answered and has not come: a request that repeats it is a client's retry. */
  #expected: string | null = null
  #failure: RefitError | null = null

  constructor (context: RouteContext) {
    this.#context = context
  }

  async init ({ host, port, gpuUuid, backend }: Communicator): Promise<void> {
    const { engine, groups } = this.#context
    const { gpus, ranks } = engine.info
    if (gpuUuid !== undefined && gpus.some(({ uuid }) => bare(uuid) === bare(gpuUuid))) {
      throw new RefitError(
        'GROUP_REFUSED',
        `client_device_uuid: this engine computes on ${gpuUuid}, and NCCL does not join two ranks on one card; train on another one`,
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

  /** Resolves once the client may send. */
  async update (parameter: NamedParameter): Promise<void> {
    this.#tell()
    if (this.#joining === null) {
      throw new RefitError('CONFLICT', 'there is no communicator: call /init_communicator/ first')
    }
    const key = JSON.stringify(parameter)
    if (this.#expected === key) return
    const joining = this.#joining
    await this.#asking.join(key, async () => {
      // One after another, also where a client has given up on one and sends the next.
      const turn = this.#turn.then(async () => {
        await joining.catch(() => {})
        await this.#tail
        this.#tell()
        await this.#begin(parameter, key)
      })
      this.#turn = turn.catch(() => {})
      await turn
    })
  }

  /** After what came before; throws what that failed by. */
  async settle (): Promise<void> {
    await this.#tail
    this.#tell()
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
    // TRL drops the caches itself, when all parameters have come.
    const written = runUpdate(this.#context, { flushCache: false }, async write => {
      const source = await this.#context.distributed.open({
        names: [name],
        dtypes: [dtype],
        shapes: [shape],
        groupName: GROUP,
        loadFormat: null,
        asks: true
      })
      const asked = askedFor(source, () => {
        this.#expected = key
        allow()
      })
      return await write(asked)
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

  /** The client goes on when all ranks have come. */
  async #meet (): Promise<void> {
    if (this.#expected === null) return
    this.#expected = null
    const barrier = this.#barrier
    try {
      const group = this.#context.groups.get(GROUP)
      await barrier?.pass({ timeoutMs: group.timeoutMs })
    } catch (error) {
      if (this.#barrier === barrier) this.#failed('the client has not come to the barrier behind a parameter', error)
    }
  }

  #failed (what: string, error: unknown): void {
    const { message = String(error), code = 'INTERNAL' } = error as Partial<RefitError>
    this.#failure ??= new RefitError('BROADCAST_SPENT', `${what}, after it had been answered: ${code}: ${message}`, {
      cause: error
    })
  }

  /** Once. */
  #tell (): void {
    const failure = this.#failure
    this.#failure = null
    if (failure !== null) throw failure
  }
}

/** The same source; `allow` is called when all is checked and bytes are waited for. What is refused before does not come. */
function askedFor (source: DistributedSource, allow: () => void): WeightSource {
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
