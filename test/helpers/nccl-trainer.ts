import { join } from 'node:path'
import type { Test } from 'tap'
import type { GroupHost } from '../../src/contract/group-host.ts'
import { createEngine } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { native } from '../../src/native/load-addon.ts'
import { packageRoot } from '../../src/root.ts'
import { StoreClient } from '../../src/rendezvous/client.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'
import { findUniqueId, publishUniqueId } from '../../src/rendezvous/unique-id.ts'
import { modelFolder, SMALL } from './load-from.ts'

const SECONDS = 60_000
/** Shared by all trainers of a test file, because an engine on a GPU takes long to make. */
let engine: Promise<LocalEngine> | undefined

async function shared (t: Test): Promise<LocalEngine> {
  if (engine === undefined) {
    const made = engine = createEngine(modelFolder('adder-base'), { ...SMALL, device: 'cuda', baseGpuId: 7 })
    let root: Test | undefined = t
    while (root.parent !== undefined) root = root.parent as Test
    root.teardown(async () => {
      await (await made).close()
    })
  }
  return await engine
}

/**
 * A library with NCCL's interface whose ranks are threads of this process (native/test/nccl_loop.cc), and simulated
 * GPUs. Call it before the addon is loaded.
 */
export function useLoop (): string {
  process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')
  process.env.REFIT_CUDA_LIBRARY = join(packageRoot, 'build/stand-in/librefit_cuda.so')
  process.env.REFIT_STAND_IN_CARDS = '8'
  return join(packageRoot, 'build/stand-in/nccl_loop.so')
}

export interface NcclTrainerOptions {
  size: number
  rank?: number
  /** Port of an engine's store, if the trainer is not rank 0. */
  port?: number
  loop: string
  /** Takes part in vLLM's first all-reduce (default true). */
  warmUp?: boolean
}

/**
 * A trainer as vLLM's NCCLTrainer: a store, a pickled id, a communicator with a first sum, and broadcasts from its
 * rank.
 */
export class NcclTrainer {
  readonly #host: GroupHost
  readonly #options: Required<Omit<NcclTrainerOptions, 'port'>>
  readonly store: StoreServer | null
  readonly #client: StoreClient
  #group: number | undefined
  #room = 0

  private constructor (
    host: GroupHost,
    options: Required<Omit<NcclTrainerOptions, 'port'>>,
    store: StoreServer | null,
    client: StoreClient
  ) {
    this.#host = host
    this.#options = options
    this.store = store
    this.#client = client
  }

  /** On a GPU that no engine of the tests uses. */
  static async start (
    t: Test,
    { size, rank = 0, port, loop, warmUp = true }: NcclTrainerOptions
  ): Promise<NcclTrainer> {
    const engine = await shared(t)
    const store = rank === 0 ? await StoreServer.listen({ host: '127.0.0.1', port: 0 }) : null
    const client = store === null
      ? await StoreClient.connect({ host: '127.0.0.1', port: port!, timeoutMs: SECONDS })
      : await store.connect()
    const trainer = new NcclTrainer(engine.groupHost, { size, rank, loop, warmUp }, store, client)
    t.teardown(async () => {
      await trainer.end().catch(() => {})
    })
    await client.countWorkers(1)
    return trainer
  }

  /** Fields of init_info. */
  init (offset = 1): Record<string, unknown> {
    return {
      master_address: '127.0.0.1',
      master_port: this.store!.address.port,
      rank_offset: offset,
      world_size: this.#options.size
    }
  }

  async join (): Promise<void> {
    const { size, rank, loop, warmUp } = this.#options
    let id: Uint8Array
    if (rank === 0) {
      await this.store!.waitForWorkers(size, { timeoutMs: SECONDS })
      id = native().ncclUniqueId(loop)
      await publishUniqueId(this.#client, '', 'vllm', id)
    } else id = (await findUniqueId(this.#client, { group: '', size, forms: ['vllm'] }, { timeoutMs: SECONDS })).id
    this.#group = native().ncclGroup(this.#host.core, { size, firstRank: rank, library: loop, warmUp })
    await this.#host.runBetweenSteps(async () => {
      await native().ncclConnect(this.#group!, id, SECONDS)
    }, SECONDS)
  }

  async broadcast (bytes: Uint8Array): Promise<void> {
    await this.#host.runBetweenSteps(async () => {
      if (bytes.length > this.#room) await native().stageGroup(this.#group!, this.#room = bytes.length, 1)
      await native().groupSend(this.#group!, bytes, SECONDS)
    }, SECONDS)
  }

  async end (): Promise<void> {
    const group = this.#group
    this.#group = undefined
    this.#client.close()
    if (group !== undefined) {
      native().groupAbort(group, 'the trainer has ended')
      await this.#host.runBetweenSteps(async () => {
        await native().endGroup(group, true)
      }, SECONDS)
    }
    await this.store?.close()
  }
}
