import { read as readFile } from 'node:fs'
import { promisify } from 'node:util'
import { payloadError } from '../../wire/torch/tensor.ts'

const pread = promisify(readFile)

/**
 * Reads bytes of a file of shared memory. `check` is called before each read and may throw. Throws TENSOR_PAYLOAD for
 * tensor `name` if the file ends too early.
 */
export async function readSpan (
  fd: number,
  position: number,
  length: number,
  name: string | undefined,
  check = (): void => {}
): Promise<Uint8Array> {
  const buffer = new Uint8Array(length)
  for (let done = 0; done < length;) {
    check()
    const { bytesRead } = await pread(fd, buffer, done, length - done, position + done)
    if (bytesRead === 0) throw payloadError('its shared memory became shorter', name)
    done += bytesRead
  }
  return buffer
}
