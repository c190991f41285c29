import type { Reply } from './http-target.ts'
import { NoReply } from './http-target.ts'
import { Broken, expect } from './promise.ts'
import { makePrompt, References } from './references.ts'
import type { Answer, Server } from './servers/server.ts'
import type { DiskTransport } from './transports/disk.ts'
import type { DistributedTransport } from './transports/distributed.ts'
import type { BucketTransport, TensorTransport } from './transports/tensor.ts'
import type { SendOptions, Transport, TransportName } from './transports/transport.ts'
import type { UploadTransport } from './transports/upload.ts'
import type { Variant, VariantName } from './variants.ts'

/** Fields of the model's config.json that matter here. */
export interface ModelFacts {
  vocabulary: number
  contextLength: number
  /** The head is the embedding, and a sent head is ignored. */
  isTied: boolean
}

/** The transports that the server's routes have; `missing` is set in those that it refuses. */
export interface Transports {
  disk?: DiskTransport
  upload?: UploadTransport
  tensor?: TensorTransport
  bucket?: BucketTransport
  distributed?: DistributedTransport
}

/** The weights that generation shows. `mixture`: those of no variant. `none`: it refuses. */
export interface Serving {
  name: VariantName | 'mixture' | 'none'
  detail: string
}

const SETTLE_MS = 100
let labels = 0

/** The server under test, its variants, and questions that promises have about it. */
export class Context {
  readonly server: Server
  readonly model: ModelFacts
  readonly variants: Readonly<Record<VariantName, Variant>>
  readonly references: References
  readonly transports: Transports
  /** The transport that puts variants in place before and after a check. */
  base: Transport
  #home = ''

  constructor (parts: {
    server: Server
    model: ModelFacts
    variants: Readonly<Record<VariantName, Variant>>
    transports: Transports
    base: Transport
  }) {
    this.server = parts.server
    this.model = parts.model
    this.variants = parts.variants
    this.transports = parts.transports
    this.base = parts.base
    this.references = new References(parts.model.vocabulary)
  }

  /** A label that no update has had. */
  newLabel (): string {
    return `conformance-${process.pid}-${++labels}`
  }

  /** The label of variant A as the last restore left it. */
  get home (): string {
    return this.#home
  }

  prompt (seed: number, length: number): number[] {
    return makePrompt(seed, length, this.model.vocabulary)
  }

  /** A greedy answer under way. */
  ask (ids: readonly number[], tokens: number): Promise<Answer> {
    const answer = this.server.generate(ids, { tokens })
    // A check may end before it awaits the answer.
    answer.catch(() => {})
    return answer
  }

  /** Resolves when the requests that were sent before are running: a short one, sent after them, has been answered. */
  async whenRunning (): Promise<void> {
    await this.server.generate(this.prompt(99, 4), { tokens: 1 })
  }

  /** Sends a whole variant. */
  async send (transport: Transport, name: VariantName, options: SendOptions = {}): Promise<Reply> {
    return await transport.send(this.variants[name].tensors, options)
  }

  /** Sends a whole variant. Throws Broken if it is refused. Returns its label. */
  async load (name: VariantName, transport: Transport = this.base): Promise<string> {
    const label = this.newLabel()
    const reply = await this.send(transport, name, { label })
    expect(reply.ok, `a correct update to ${name} by ${transport.name} was refused: ${reply.text}`)
    return label
  }

  /** Throws NoReply only. */
  async serving (): Promise<Serving> {
    try {
      const fingerprint = await this.references.fingerprint(this.server)
      const name = this.references.identify(fingerprint)
      if (name !== null) return { name, detail: name }
      return { name: 'mixture', detail: `weights of no variant (${this.references.describe(fingerprint)})` }
    } catch (error) {
      if (error instanceof NoReply || !(error instanceof Broken)) throw error
      return { name: 'none', detail: `nothing: ${error.message}` }
    }
  }

  async expectServing (name: VariantName, when: string): Promise<void> {
    const serving = await this.serving()
    expect(serving.name === name, `${when}, the server serves ${serving.detail} instead of ${name}`)
  }

  /** Throws Broken unless the reply refuses and neither weights nor label have changed. */
  async expectRefusal (reply: Reply, what: string): Promise<string> {
    const label = await this.server.label()
    const serving = await this.serving()
    expect(!reply.ok, `${what} was accepted (${reply.text}); the server then serves ${serving.detail}`)
    expect(serving.name === 'A', `${what} was refused (${reply.text}), but the server then serves ${serving.detail}`)
    expect(label === null || label === this.home, `${what} was refused (${reply.text}), but the label is now ${label}`)
    return reply.text
  }

  /** The weights that are served once they are the same twice, after an update whose reply nobody reads. */
  async settled (): Promise<Serving> {
    for (let last = await this.serving(), same = 0;;) {
      await new Promise(resolve => setTimeout(resolve, SETTLE_MS))
      const serving = await this.serving()
      same = serving.name === last.name ? same + 1 : 0
      if (same === 3) return serving
      last = serving
    }
  }

  /** Puts variant A in place, under a label of its own. Throws Broken if that fails. */
  async restore (): Promise<void> {
    await this.server.giveUp()
    await this.server.resume()
    if (await this.#isHome()) return
    // A check may have killed the group that the transport had.
    this.#home = await this.load('A').catch(async () => await this.load('A'))
    await this.expectServing('A', 'after a whole update to A')
  }

  async #isHome (): Promise<boolean> {
    const label = await this.server.label()
    return (label === null || label === this.#home) && (await this.serving()).name === 'A'
  }

  async close (): Promise<void> {
    for (const transport of listTransports(this.transports)) await transport.close().catch(() => {})
  }
}

/** In the order in which they are preferred for putting variants in place. */
export function listTransports ({ disk, tensor, bucket, upload, distributed }: Transports): Transport[] {
  return [disk, tensor, bucket, upload, distributed].filter(transport => transport !== undefined)
}

/** The transports as ways of a promise, those that `suits` is true for. */
export function everyTransport (
  suits: (transport: Transport) => boolean = () => true
): (context: Context) => readonly Transport[] {
  return ({ transports }) => listTransports(transports).filter(suits)
}

/** Only the named transports. */
export function transportsNamed<Name extends TransportName> (
  ...names: Name[]
): (context: Context) => ReadonlyArray<Required<Transports>[Name]> {
  return ({ transports }) =>
    listTransports(transports).filter(({ name }) => names.includes(name as Name)) as Array<Required<Transports>[Name]>
}
