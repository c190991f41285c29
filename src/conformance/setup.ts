import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { RefitError } from '../errors.ts'
import { Context, listTransports } from './context.ts'
import type { ModelFacts, Transports } from './context.ts'
import { Broken } from './promise.ts'
import type { Server } from './servers/server.ts'
import { DiskTransport } from './transports/disk.ts'
import type { WorkFolder } from './transports/disk.ts'
import { DistributedTransport } from './transports/distributed.ts'
import { BucketTransport, TensorTransport } from './transports/tensor.ts'
import type { Transport, TransportName } from './transports/transport.ts'
import { UploadTransport } from './transports/upload.ts'
import { writeVariants } from './variants.ts'

/** All that `--transports` may name. */
export const TRANSPORTS: readonly TransportName[] = ['disk', 'tensor', 'bucket', 'upload', 'distributed']
/** Answers of two variants differ by at least so many tolerances, or what is served cannot be told. */
const MIN_DISTANCE = 4

export interface SetupOptions {
  server: Server
  work: WorkFolder
  /** The address at which the server reaches this machine. */
  address: string
  /** Transports to try. */
  transports: readonly TransportName[]
}

/**
 * Finds the transports that the server takes and learns its answers for A, B and C. Throws Broken if no transport
 * changes what it serves.
 */
export async function setUp ({ server, work, address, transports: wanted }: SetupOptions): Promise<Context> {
  const variants = writeVariants(work.model, work.path)
  const model = readFacts(work.model)
  const transports = makeTransports(server, work, Object.values(variants), await server.ranks(), address)
  try {
    const working = await findWorking(transports, wanted, variants.A.tensors)
    const context = new Context({ server, model, variants, transports, base: working[0]! })
    await learn(context, working)
    return context
  } catch (error) {
    for (const transport of listTransports(transports)) await transport.close()
    throw error
  }
}

/** The transports that take A, at least one. Sets `missing` in those that are refused or not wanted. */
async function findWorking (
  transports: Transports,
  wanted: readonly TransportName[],
  tensors: Parameters<Transport['send']>[0]
): Promise<Transport[]> {
  const working: Transport[] = []
  for (const transport of listTransports(transports)) {
    if (!wanted.includes(transport.name)) {
      transport.missing = 'left out by --transports'
      continue
    }
    const refused = await refusalOf(transport, tensors)
    if (refused === null) working.push(transport)
    else if (!refused.isFailure) transport.missing = refused.text
  }
  if (working.length === 0) {
    const reasons = listTransports(transports).map(({ name, missing }) => `${name}: ${missing ?? 'failed'}`).join('; ')
    throw new RefitError('ENGINE_FAILED', `no transport reaches the server with variant A (${reasons})`)
  }
  return working
}

function makeTransports (
  server: Server,
  work: WorkFolder,
  variants: ConstructorParameters<typeof DiskTransport>[2],
  ranks: number,
  address: string
): Transports {
  const disk = new DiskTransport(server, work, variants)
  const distributed = new DistributedTransport(server, { ranks, address })
  if (server.kind === 'vllm') return { disk, distributed }
  const tensor = new TensorTransport(server.target, ranks)
  return { disk, tensor, bucket: new BucketTransport(tensor), upload: new UploadTransport(server.target), distributed }
}

/** Null if the update succeeded. A 4xx says that the server does not take it; all else is a failure. */
async function refusalOf (
  transport: Transport,
  tensors: Parameters<Transport['send']>[0]
): Promise<{ text: string, isFailure: boolean } | null> {
  try {
    const { ok, status, text } = await transport.send(tensors)
    return ok ? null : { text, isFailure: status >= 500 || status < 300 }
  } catch (error) {
    if (error instanceof Broken) return { text: error.message, isFailure: true }
    throw error
  }
}

/** The first transport that makes three variants distinct is the base. */
async function learn (context: Context, working: readonly Transport[]): Promise<void> {
  const { references, server } = context
  const failures: string[] = []
  for (const base of working) {
    context.base = base
    for (const name of ['A', 'B', 'C'] as const) {
      await context.load(name)
      await references.learn(name, server)
    }
    const { distance, tolerance } = references
    if (distance > MIN_DISTANCE * tolerance.score) {
      await context.restore()
      return
    }
    failures.push(
      `by ${base.name} the answers of A, B and C differ by ${distance.toFixed(4)}, and those of one of them by up to ` +
        tolerance.score.toFixed(4)
    )
  }
  throw new Broken(`no update changes what the server answers: ${failures.join('; ')}`)
}

function readFacts (model: string): ModelFacts {
  const path = join(model, 'config.json')
  let config: any
  try {
    config = JSON.parse(readFileSync(path, 'utf8'))
  } catch (error) {
    throw new RefitError('CONFIG', `--model: ${path} cannot be read: ${(error as Error).message}`, { param: '--model' })
  }
  const text = config.text_config ?? config
  if (typeof text.vocab_size !== 'number') {
    throw new RefitError('CONFIG', `--model: ${path} has no vocab_size`, { param: '--model' })
  }
  return {
    vocabulary: text.vocab_size,
    contextLength: text.max_position_embeddings ?? 2048,
    isTied: (config.tie_word_embeddings ?? text.tie_word_embeddings) === true
  }
}
