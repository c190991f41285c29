import type { AdapterReport } from '../contract/adapters.ts'
import { RefitError } from '../errors.ts'
import { announcedTensors, requireWeights } from '../sources/distributed/announced.ts'
import type { ReceivedTensors } from '../sources/distributed/distributed.ts'
import { measureTensors } from '../sources/measure-tensors.ts'
import {
  FROM_TENSORS,
  loadAdapterFromGroup,
  loadAdapterFromSource,
  ofAdapter,
  requireAdapters,
  withNote
} from './adapter-load.ts'
import type { AdapterHost, GroupAdapter } from './adapter-load.ts'
import { GROUP_NAME } from './distributed-update.ts'
import { joinSources } from './join-sources.ts'

export interface AdapterPart {
  /** The loaded adapter; null until its last part has come. */
  report: AdapterReport | null
  /** Modules that its configuration targets and no part had so far. */
  missing: readonly string[]
}

/** The parts of one adapter that have come, in host memory. */
interface Begun {
  name: string
  config: string
  parts: ReceivedTensors[]
  missing: readonly string[]
}

/**
 * Loads adapters that come in parts, each broadcast by a request of its own: buckets, or a pipeline stage's layers. An
 * adapter is whole when all modules that its configuration targets have come. Until then the version before stays.
 */
export class AdapterParts {
  readonly #host: AdapterHost
  #begun: Begun | null = null
  /** One part at a time. */
  #turn: Promise<unknown> = Promise.resolve()

  constructor (host: AdapterHost) {
    this.#host = host
  }

  /**
   * Receives one part, and loads the adapter with the last one. A part of another adapter drops those of the one
   * before, which has failed then. So does a part after the end of a group that sent one: its trainer has begun again.
   * The tensors of a refused part are received and dropped first, and the adapter's other parts with them.
   */
  async add (adapter: GroupAdapter): Promise<AdapterPart> {
    const own = this.#turn.then(async () => await this.#add(adapter))
    this.#turn = own.catch(() => {})
    return await own
  }

  async #add (adapter: GroupAdapter): Promise<AdapterPart> {
    const { name, config } = adapter
    const begun = this.#begunBy(adapter)
    this.#begun = null
    const missing = await this.#missing(begun, adapter)
    if (begun.parts.length === 0 && missing.length === 0) {
      return { report: await loadAdapterFromGroup(this.#host, adapter), missing }
    }
    const { names, dtypes, shapes, groupName = GROUP_NAME, loadFormat = null } = adapter
    const request = { names, dtypes, shapes, groupName, loadFormat }
    begun.parts.push(
      await this.#host.distributed.receive(request).catch((error: unknown) => {
        throw ofAdapter(name, error)
      })
    )
    if (missing.length > 0) {
      this.#begun = { ...begun, missing }
      return { report: null, missing }
    }
    const report = await loadAdapterFromSource(this.#host, { name }, {
      config,
      open: async () => joinSources(begun.parts.map(({ source }) => source)),
      path: FROM_TENSORS
    })
    return { report, missing }
  }

  /** A part that is sent again replaces the one with the same tensors. */
  #begunBy ({ name, config, names }: GroupAdapter): Begun {
    const text = JSON.stringify(config)
    const known = this.#begun
    const isSame = known?.name === name && known.config === text && known.parts.every(part => part.isCurrent())
    if (!isSame) {
      if (known !== null) this.#fail(known)
      return { name, config: text, parts: [], missing: [] }
    }
    const sent = new Set(names)
    return { ...known, parts: known.parts.filter(({ source }) => !source.tensors.some(({ name }) => sent.has(name))) }
  }

  /** For an adapter whose other parts do not come any more. */
  #fail ({ name, missing }: Begun): void {
    const error = new RefitError(
      'WEIGHTS_INCOMPLETE',
      `${missing.length} modules of LoRA adapter ${JSON.stringify(name)} have not come, among them ${missing[0]}; ` +
        'the parts that had come are dropped'
    )
    this.#host.updates.begin({ adapter: name }).fail(error)
    this.#host.metrics.observeFailedAdapter()
  }

  async #missing ({ parts }: Begun, adapter: GroupAdapter): Promise<readonly string[]> {
    const { name, config, names, dtypes, shapes, groupName = GROUP_NAME, loadFormat } = adapter
    try {
      const adapters = requireAdapters(this.#host.engine)
      const own = measureTensors(names, dtypes, shapes)
      requireWeights(own)
      const tensors = [...parts.flatMap(({ source }) => source.tensors), ...announcedTensors(own, own.map(() => 0))]
      return adapters.missingOf?.(config, tensors) ?? []
    } catch (error) {
      this.#host.updates.begin({ adapter: name }).fail(error)
      this.#host.metrics.observeFailedAdapter()
      const request = { names, dtypes, shapes, group_name: groupName, load_format: loadFormat }
      throw withNote(ofAdapter(name, error), await this.#host.distributed.refuse(request, groupName))
    }
  }
}
