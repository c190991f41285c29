import type { TensorBody } from './body.ts'
import type { IpcHandle } from './ipc-handle.ts'
import type { TensorDescriptor, TensorStorage } from './tensor.ts'

// A body as arrays, to be posted to another thread. Structured cloning of some 19,000 descriptors and their storages
// takes longer than reading them. These are a list of texts, one of handles and one of numbers, whose buffer is
// transferred.

export interface PackedTensorBody {
  numbers: Float64Array<ArrayBuffer>
  texts: string[]
  handles: IpcHandle[]
}

const KINDS = ['empty', 'cuda', 'shared-file', 'descriptor'] as const
const NONE = -1

/** Transfer `numbers.buffer` with it. */
export function packTensorBody ({ ranks, storages }: TensorBody): PackedTensorBody {
  const packer = new Packer()
  const indices = new Map<TensorStorage, number>()
  packer.put(storages.length)
  for (const storage of storages) {
    indices.set(storage, indices.size)
    packStorage(storage, packer)
  }
  const lists = [...new Set(ranks)]
  packer.put(lists.length)
  for (const list of lists) {
    packer.put(list.length)
    for (const tensor of list) packTensor(tensor, indices.get(tensor.storage) ?? NONE, packer)
  }
  packer.put(ranks.length)
  for (const rank of ranks) packer.put(lists.indexOf(rank))
  return { numbers: packer.numbers(), texts: packer.texts, handles: [...packer.handles.keys()] }
}

export function unpackTensorBody (packed: PackedTensorBody): TensorBody {
  const unpacker = new Unpacker(packed)
  const storages = unpacker.list(() => unpackStorage(unpacker))
  const lists = unpacker.list(() => unpacker.list(() => unpackTensor(unpacker, storages)))
  return { ranks: unpacker.list(() => lists[unpacker.next()]!), storages }
}

function packTensor ({ name, dtype, shape, stride, offset }: TensorDescriptor, storage: number, packer: Packer): void {
  packer.text(name)
  packer.known(dtype)
  packer.put(shape.length)
  for (const size of shape) packer.put(size)
  for (const step of stride) packer.put(step)
  packer.put(offset)
  packer.put(storage)
}

function unpackTensor (unpacker: Unpacker, storages: readonly TensorStorage[]): TensorDescriptor {
  const name = unpacker.text()
  const dtype = unpacker.text()
  const dims = unpacker.next()
  const shape = unpacker.many(dims)
  const stride = unpacker.many(dims)
  const offset = unpacker.next()
  return { name, dtype, shape, stride, offset, storage: storages[unpacker.next()] ?? { kind: 'empty', bytes: 0 } }
}

function packStorage (storage: TensorStorage, packer: Packer): void {
  if (storage.kind === 'memory') throw new TypeError('memory of this process is not sent between its threads')
  packer.put(KINDS.indexOf(storage.kind))
  packer.put(storage.bytes)
  switch (storage.kind) {
    case 'cuda':
      packer.put(typeof storage.device === 'number' ? storage.device : NONE)
      if (typeof storage.device === 'string') packer.known(storage.device)
      packer.handle(storage.handle)
      packer.put(storage.offset)
      packer.known(storage.counterFile)
      packer.put(storage.counterSlot)
      packer.put(storage.event === null ? 0 : 1)
      if (storage.event !== null) packer.text(storage.event)
      break
    case 'shared-file':
      packer.text(storage.file)
      packer.known(storage.manager)
      break
    case 'descriptor':
      packer.known(storage.address)
      packer.put(storage.key)
  }
}

function unpackStorage (unpacker: Unpacker): TensorStorage {
  const kind = KINDS[unpacker.next()]!
  const bytes = unpacker.next()
  switch (kind) {
    case 'cuda': {
      const index = unpacker.next()
      const device = index === NONE ? unpacker.text() : index
      const handle = unpacker.handle()
      const offset = unpacker.next()
      const counterFile = unpacker.text()
      const counterSlot = unpacker.next()
      return {
        kind,
        device,
        handle,
        offset,
        bytes,
        counterFile,
        counterSlot,
        event: unpacker.next() === 0 ? null : unpacker.text()
      }
    }
    case 'shared-file': {
      const file = unpacker.text()
      return { kind, file, manager: unpacker.text(), bytes }
    }
    case 'descriptor': {
      const address = unpacker.text()
      return { kind, address, key: unpacker.next(), bytes }
    }
    case 'empty':
      return { kind, bytes: 0 }
  }
}

class Packer {
  readonly texts: string[] = []
  readonly handles = new Map<IpcHandle, number>()
  readonly #known = new Map<string, number>()
  #numbers = new Float64Array(1024)
  #used = 0

  put (value: number): void {
    if (this.#used === this.#numbers.length) {
      const grown = new Float64Array(this.#used * 2)
      grown.set(this.#numbers)
      this.#numbers = grown
    }
    this.#numbers[this.#used++] = value
  }

  text (text: string): void {
    this.put(this.texts.push(text) - 1)
  }

  /** A text that is often repeated: stored once. */
  known (text: string): void {
    const index = this.#known.get(text)
    if (index !== undefined) return this.put(index)
    this.#known.set(text, this.texts.length)
    this.text(text)
  }

  handle (handle: IpcHandle): void {
    const index = this.handles.get(handle)
    if (index === undefined) this.handles.set(handle, this.handles.size)
    this.put(index ?? this.handles.size - 1)
  }

  numbers (): Float64Array<ArrayBuffer> {
    return this.#numbers.slice(0, this.#used)
  }
}

class Unpacker {
  readonly #packed: PackedTensorBody
  #at = 0

  constructor (packed: PackedTensorBody) {
    this.#packed = packed
  }

  next (): number {
    return this.#packed.numbers[this.#at++]!
  }

  many (count: number): number[] {
    const values: number[] = []
    for (let i = 0; i < count; i++) values.push(this.next())
    return values
  }

  list<T> (read: () => T): T[] {
    const values: T[] = []
    for (let left = this.next(); left > 0; left--) values.push(read())
    return values
  }

  text (): string {
    return this.#packed.texts[this.next()]!
  }

  handle (): IpcHandle {
    return this.#packed.handles[this.next()]!
  }
}
