// Pickles of handles as torch's senders write them, made without torch, for measuring the decoder and the whole path.

const REDUCTIONS = 'torch.multiprocessing.reductions'

type Part = string | Buffer | number

/** One GPU tensor with a handle of its own. */
export interface GpuTensor {
  name: string
  shape: [number, number]
}

/**
 * A list of (name, tensor) of one sender's GPU, base64: a segment for every 32 tensors, a slot of the counter file for
 * each.
 */
export function gpuEntry (tensors: readonly GpuTensor[]): string {
  const pickler = new Pickler()
  pickler.op('](')
  for (const [index, { name, shape: [rows, cols] }] of tensors.entries()) {
    const handle = Buffer.alloc(66, index >>> 5)
    handle.write('\x02c', 'latin1')
    pickler.text(name)
    pickler.global(REDUCTIONS, 'rebuild_cuda_tensor')
    pickler.op('(')
    pickler.global('torch', 'Tensor')
    pickler.size([rows, cols])
    pickler.tuple([cols, 1])
    pickler.int(0)
    pickler.global('torch.storage', 'TypedStorage')
    pickler.global('torch', 'bfloat16')
    pickler.int(0)
    pickler.bytes(handle)
    pickler.int(rows * cols * 2)
    pickler.int((index & 31) << 21)
    pickler.op('\x89')
    pickler.bytes(Buffer.from(`/torch_4242_1234567890_${Math.floor(index / 10_000)}`))
    pickler.int(index % 10_000)
    pickler.bytes(Buffer.alloc(64, index & 127))
    pickler.op('\x88t\x94R\x94\x86\x94')
    pickler.memoized += 3
  }
  pickler.op('e.')
  return pickler.base64()
}

export interface SharedView {
  name: string
  shape: readonly number[]
  dtype: string /** Elements. */
  offset: number
}

/** A list of (name, tensor), all of them views of one storage in the shared memory `file`, base64. */
export function sharedEntry (file: string, bytes: number, tensors: readonly SharedView[]): string {
  const pickler = new Pickler()
  pickler.op('](')
  for (const [index, { name, shape, dtype, offset }] of tensors.entries()) {
    pickler.text(name)
    pickler.global(REDUCTIONS, 'rebuild_tensor')
    pickler.op('(')
    pickler.global('torch', 'Tensor')
    pickler.global(REDUCTIONS, 'rebuild_typed_storage')
    pickler.op('(')
    if (index > 0) pickler.get('storage')
    else {
      pickler.global(REDUCTIONS, 'rebuild_storage_filename')
      pickler.op('(')
      pickler.global('torch.storage', 'UntypedStorage')
      pickler.bytes(Buffer.from('/tmp/torch-shm-dir-bench/manager.sock'))
      pickler.bytes(Buffer.from(file))
      pickler.int(bytes)
      pickler.op('tR')
      pickler.put('storage')
    }
    pickler.global('torch', dtype)
    pickler.op('tR(')
    pickler.int(offset)
    pickler.size(shape)
    pickler.tuple(shape.map((_, axis) => shape.slice(axis + 1).reduce((a, b) => a * b, 1)))
    pickler.op('\x89ttR\x86')
  }
  pickler.op('e.')
  return pickler.base64()
}

/** A bucket without tensors, as slime sends it to ranks for which it has no tensors. */
export function emptyBucketEntry (): string {
  const pickler = new Pickler()
  pickler.op('}(')
  pickler.text('flattened_tensor')
  pickler.global(REDUCTIONS, 'rebuild_cuda_tensor')
  pickler.op('(')
  pickler.global('torch', 'Tensor')
  pickler.size([0])
  pickler.tuple([1])
  pickler.int(0)
  pickler.global('torch.storage', 'TypedStorage')
  pickler.global('torch', 'uint8')
  pickler.int(0)
  pickler.op('N')
  pickler.int(0)
  pickler.int(0)
  pickler.op('\x89N')
  pickler.int(0)
  pickler.op('NNtR')
  pickler.text('metadata')
  pickler.op(']u.')
  return pickler.base64()
}

/** Protocol 4: names and repeated texts use the memo, as in Python's pickler. */
class Pickler {
  readonly #parts: Buffer[] = [Buffer.from('\x80\x04', 'latin1')]
  readonly #known = new Map<string, number>()
  memoized = 0

  op (codes: string): void {
    this.#parts.push(Buffer.from(codes, 'latin1'))
  }

  put (key: string): void {
    this.#known.set(key, this.memoized++)
    this.op('\x94')
  }

  get (key: string): boolean {
    const index = this.#known.get(key)
    if (index === undefined) return false
    if (index < 256) this.#push('h', index)
    else this.#push('j', u32(index))
    return true
  }

  text (text: string): void {
    if (this.get(`text ${text}`)) return
    const bytes = Buffer.from(text)
    this.#push('\x8c', bytes.length, bytes)
    this.put(`text ${text}`)
  }

  bytes (bytes: Buffer): void {
    this.#push('C', bytes.length, bytes, '\x94')
    this.memoized++
  }

  global (module: string, name: string): void {
    if (this.get(`global ${module} ${name}`)) return
    this.text(module)
    this.text(name)
    this.op('\x93')
    this.put(`global ${module} ${name}`)
  }

  int (value: number): void {
    if (value < 256) this.#push('K', value)
    else if (value < 2 ** 31) this.#push('J', u32(value))
    else this.#push('\x8a', 8, u32(value % 2 ** 32), u32(Math.floor(value / 2 ** 32)))
  }

  tuple (values: readonly number[]): void {
    this.op('(')
    for (const value of values) this.int(value)
    this.op('t\x94')
    this.memoized++
  }

  size (shape: readonly number[]): void {
    this.global('torch', 'Size')
    this.tuple(shape)
    this.op('\x85\x94R\x94')
    this.memoized += 2
  }

  base64 (): string {
    return Buffer.concat(this.#parts).toString('base64')
  }

  #push (...parts: Part[]): void {
    for (const part of parts) {
      this.#parts.push(
        typeof part === 'string' ? Buffer.from(part, 'latin1') : typeof part === 'number' ? Buffer.from([part]) : part
      )
    }
  }
}

function u32 (value: number): Buffer {
  const bytes = Buffer.alloc(4)
  bytes.writeUInt32LE(value)
  return bytes
}
