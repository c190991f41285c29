import {
  closeSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readSync,
  rmSync,
  unlinkSync,
  writeSync
} from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { FastifyInstance } from 'fastify'
import type { Test } from 'tap'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import type { LocalEngine } from '../../src/engine/local-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { createServer } from '../../src/app/server.ts'
import type { ServerOptions } from '../../src/app/server.ts'
import { randomValues, writeModelFolder } from './make-checkpoint.ts'
import { assemble, bin, global, PROTO4, str, u64 } from './pickles.ts'
import { contiguous, int, pickledTensor, tuple } from './shared-tensors.ts'
import type { SharedTensor } from './shared-tensors.ts'

// GPU tensors without a GPU: the pickles that torch makes of them, with handles that the stand-in library opens
// (native/test/ipc_stand_in.cc), and counter files as torch makes them.

/** Call it before the addon is loaded. */
export function useStandIn (): void {
  process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')
  process.env.REFIT_CUDA_LIBRARY = join(packageRoot, 'build/stand-in/librefit_cuda.so')
  if (!existsSync(process.env.REFIT_CUDA_LIBRARY)) {
    throw new Error(`${process.env.REFIT_CUDA_LIBRARY} is missing: run "node scripts/build-native.js --faults"`)
  }
}

/** The UUIDs of the stand-in. */
export const gpuUuid = (gpu: number): string => `00000000-0000-0000-0000-00000000000${gpu}`

const HEADER = 64
const SLOTS = 10_000
const COUNTER_BYTES = HEADER + 8 * SLOTS
let made = 0

interface File {
  name: string
  fd: number
  remove: () => void
}

function file (t: Test, prefix: string, data: Uint8Array): File {
  const name = `/${prefix}_${process.pid}_${Math.floor(Math.random() * 1e9)}_${made++}`
  const fd = openSync(`/dev/shm${name}`, 'wx+', 0o600)
  writeSync(fd, data, 0, data.length, 0)
  let open = true
  const remove = (): void => {
    if (existsSync(`/dev/shm${name}`)) unlinkSync(`/dev/shm${name}`)
  }
  t.teardown(() => {
    if (open) closeSync(fd)
    open = false
    remove()
  })
  return { name, fd, remove }
}

export interface Segment {
  /** 64 bytes. */
  handle: Buffer
  bytes: number
  remove: () => void
  /** Overwrites the data from a byte on. */
  fill: (at: number, data: Uint8Array) => void
}

/** GPU memory. */
export function segment (t: Test, data: Uint8Array): Segment {
  const { name, fd, remove } = file(t, 'refit_segment', data)
  return {
    handle: padded(name),
    bytes: data.length,
    remove,
    fill: (at, data) => {
      writeSync(fd, data, 0, data.length, at)
    }
  }
}

export interface Event {
  handle: Buffer
  set: () => void
  remove: () => void
}

/** An event that is done already, or that becomes done when it is set. */
export function event (t: Test, done = true): Event {
  const { name, fd, remove } = file(t, 'refit_event', Buffer.from([done ? 1 : 0, 0, 0, 0]))
  return {
    handle: padded(name),
    remove,
    set: () => {
      writeSync(fd, Buffer.from([1]), 0, 1, 0)
    }
  }
}

function padded (name: string): Buffer {
  const handle = Buffer.alloc(64)
  handle.write(name)
  return handle
}

/** One handle of a storage, with a slot of its own. */
export interface Share {
  counter: string
  slot: number
}

/** A torch process's counter file. */
export class Sender {
  readonly name: string
  readonly remove: () => void
  readonly #fd: number
  #used = 0

  constructor (t: Test) {
    const { name, fd, remove } = file(t, 'torch', Buffer.alloc(COUNTER_BYTES))
    this.name = name
    this.#fd = fd
    this.remove = remove
  }

  share (): Share {
    writeSync(this.#fd, u64(1n), 0, 8, HEADER + 8 * this.#used)
    return { counter: this.name, slot: this.#used++ }
  }

  /** The number of handles that are still held, and of those whose reference was released twice. */
  get held (): number {
    const counts = Buffer.alloc(COUNTER_BYTES)
    readSync(this.#fd, counts, 0, COUNTER_BYTES, 0)
    let held = 0
    for (let slot = 0; slot < SLOTS; slot++) {
      const count = counts.readBigInt64LE(HEADER + 8 * slot)
      if (count !== 0n && (count !== 1n || slot >= this.#used)) throw new Error(`slot ${slot} is ${count}`)
      held += Number(count)
    }
    return held
  }

  get shares (): number {
    return this.#used
  }
}

export interface CudaTensor {
  name: string
  shape: number[]
  dtype?: string
  stride?: number[]
  /** Elements from the start of the storage. */
  offset?: number
  /** Default: the UUID of GPU 0. */
  device?: number | string
  blob: Uint8Array
  storageBytes: number
  storageOffset?: number
  share: Share
  event?: Buffer | null
}

/** A handle blob as torch's allocator writes it; version 0 is the bare handle of torch up to 2.4. */
export function blobOf ({ handle }: Pick<Segment, 'handle'>, version = 2): Buffer {
  return version === 0 ? handle : assemble(version, 'c', handle)
}

/** A blob of an expandable segment: descriptors of a process, or handles of 64 bytes. */
export function expandableBlob (
  version: 1 | 2 | 3,
  pid: number,
  blockBytes: number,
  blocks: number[] | Buffer[]
): Buffer {
  const head = Buffer.alloc(version === 3 ? 32 : 24, 0xa5)
  head.writeInt32LE(pid, 0)
  head.writeBigUInt64LE(BigInt(blockBytes), 8)
  head.writeBigUInt64LE(BigInt(blocks.length), 16)
  if (version === 3) head.writeInt32LE(typeof blocks[0] === 'number' ? 1 : 2, 24)
  const entries = blocks.map(block => {
    if (typeof block !== 'number') return block
    const bytes = Buffer.alloc(4)
    bytes.writeInt32LE(block)
    return bytes
  })
  return assemble(version, 'e', head, ...entries)
}

/** An element of `serialized_named_tensors`: a list of (name, tensor), on GPUs and in shared memory. */
export function cudaEntry (tensors: Array<CudaTensor | SharedTensor>): string {
  const items = tensors.map(tensor =>
    assemble(str(tensor.name), 'blob' in tensor ? pickledCuda(tensor) : pickledTensor(tensor), '\x86')
  )
  return assemble(PROTO4, ']', '(', ...items, 'e', '.').toString('base64')
}

/**
 * Results of reduce_tensor by the GPU's UUID, as vLLM's senders pickle them: (function, arguments), or in newer
 * versions only the arguments.
 */
export type GpuOffer = Readonly<Record<string, CudaTensor>>

/** `ipc_handles_pickled` for a list of tensors, or for one packed tensor. */
export function offerEntry (offers: readonly GpuOffer[] | GpuOffer, isBare = false): string {
  const dict = (offer: GpuOffer): Buffer =>
    assemble(
      '}',
      '(',
      ...Object.entries(offer).flatMap(([gpu, tensor]) => {
        const args = pickledArgs({ ...tensor, device: typeof tensor.device === 'number' ? tensor.device : 0 })
        return [
          str(gpu),
          isBare ? args : assemble(global('torch.multiprocessing.reductions', 'rebuild_cuda_tensor'), args, '\x86')
        ]
      }),
      'u'
    )
  const body = Array.isArray(offers) ? assemble(']', '(', ...offers.map(dict), 'e') : dict(offers as GpuOffer)
  return assemble(PROTO4, body, '.').toString('base64')
}

/** The call of rebuild_cuda_tensor with its 15 arguments. */
function pickledCuda (tensor: CudaTensor): Buffer {
  const patched = typeof (tensor.device ?? gpuUuid(0)) === 'string'
  return assemble(
    patched
      ? global('sglang.srt.utils.patch_torch', '_rebuild_cuda_tensor_modified')
      : global('torch.multiprocessing.reductions', 'rebuild_cuda_tensor'),
    pickledArgs(tensor),
    'R'
  )
}

function pickledArgs (
  {
    shape,
    dtype = 'bfloat16',
    stride,
    offset = 0,
    device = gpuUuid(0),
    blob,
    storageBytes,
    storageOffset = 0,
    share,
    event = null
  }: CudaTensor
): Buffer {
  return assemble(
    '(',
    global('torch', 'Tensor'),
    assemble(global('torch', 'Size'), tuple(shape), '\x85', 'R'),
    tuple(stride ?? contiguous(shape)),
    int(offset),
    global('torch.storage', 'TypedStorage'),
    global('torch', dtype),
    typeof device === 'string' ? str(device) : int(device),
    bin(blob),
    int(storageBytes),
    int(storageOffset),
    '\x89',
    bin(Buffer.from(share.counter)),
    int(share.slot),
    bin(event ?? Buffer.alloc(64)),
    event === null ? '\x89' : '\x88',
    't'
  )
}

export interface Reply {
  status: number
  body: any
}

export interface CudaServer {
  engine: LocalEngine
  app: FastifyInstance
  url: string
  post: (path: string, body?: unknown) => Promise<Reply>
  /** The body of a 200; throws for anything else. */
  ok: (path: string, body?: unknown) => Promise<any>
  metric: (name: string) => Promise<number>
  close: () => Promise<void>
}

/** A server whose engine runs on the stand-in, with weights of seed 1. */
export async function cudaServer (
  t: Test,
  config: Record<string, unknown>,
  options: EngineOptions = {},
  server: Partial<ServerOptions> = {}
): Promise<CudaServer> {
  const folder = mkdtempSync(join(tmpdir(), 'refit-cuda-'))
  mkdirSync(folder, { recursive: true })
  writeModelFolder(folder, config, { values: randomValues(1, 0.05) })
  const engine = await createEngine(folder, { device: 'cuda', threads: 1, maxTotalTokens: 512, ...options })
  const app = await createServer({ engine, tokenizer: null, closeGraceMs: 500, warmUp: false, ...server })
  const url = await app.listen({ host: '127.0.0.1', port: 0 })
  let closed = false
  const close = async (): Promise<void> => {
    if (closed) return
    closed = true
    await app.close()
    await engine.close()
    rmSync(folder, { recursive: true })
  }
  t.teardown(close)
  const post = async (path: string, body: unknown = {}): Promise<Reply> => {
    const reply = await fetch(url + path, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(body)
    })
    return { status: reply.status, body: await reply.json() }
  }
  return {
    engine,
    app,
    url,
    post,
    ok: async (path, body) => {
      const reply = await post(path, body)
      if (reply.status !== 200) throw new Error(`${path} answered ${reply.status}: ${JSON.stringify(reply.body)}`)
      return reply.body
    },
    metric: async name => {
      const text = await (await fetch(`${url}/metrics`)).text()
      return Number(new RegExp(`^refit:${name}(?:\\{.*\\})? (\\S+)$`, 'm').exec(text)?.[1] ?? NaN)
    },
    close
  }
}
