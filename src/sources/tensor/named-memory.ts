import { constants, open } from 'node:fs/promises'
import { RefitError } from '../../errors.ts'
import { payloadError } from '../../wire/torch/tensor.ts'
import type { NamedMemory } from '../../wire/trainers/verl-buckets.ts'
import type { OpenHandle } from './tensor-receiver.ts'

const FOLDER = '/dev/shm'

/**
 * Opens POSIX shared memory of the same user as a flat buffer. The process that made it removes it. Throws
 * TENSOR_PAYLOAD.
 */
export async function openNamedMemory ({ name, bytes }: NamedMemory, label: string): Promise<OpenHandle> {
  const file = await open(`${FOLDER}/${name}`, constants.O_RDONLY | constants.O_NOFOLLOW).catch((error: unknown) => {
    throw payloadError(
      `shared memory ${name} cannot be opened (${
        (error as NodeJS.ErrnoException).code ?? 'unknown'
      }): trainer and engine need the same /dev/shm (containers: --ipc=host)`,
      label
    )
  })
  try {
    const stats = await file.stat()
    if (!stats.isFile() || stats.uid !== process.getuid?.()) {
      throw payloadError(
        `shared memory ${name} belongs to user ${stats.uid}: run trainer and engine as one user`,
        label
      )
    }
    if (stats.size < bytes) {
      throw payloadError(`shared memory ${name} has ${stats.size} bytes, and ${bytes} were announced`, label)
    }
  } catch (error) {
    await file.close()
    throw error
  }
  let isOpen = true
  const source = {
    verify: async () => {
      if (!isOpen) throw new RefitError('INTERNAL', 'the shared memory was closed before it was read')
    },
    rest: () => {},
    close: async () => {
      if (!isOpen) return
      isOpen = false
      await file.close()
    }
  }
  // It has no reference count, so the code that releases references treats it as memory of this process.
  return {
    tensor: {
      name: label,
      dtype: 'uint8',
      shape: [bytes],
      stride: [1],
      offset: 0,
      storage: { kind: 'memory', data: new Uint8Array(0), bytes }
    },
    memory: { fd: file.fd },
    source
  }
}
