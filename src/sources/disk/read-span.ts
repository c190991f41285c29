import { read as readFile } from 'node:fs'
import { promisify } from 'node:util'
import { payloadError } from '../../wire/torch/tensor.ts'

const pread = promisify(readFile)

/** Bytes of a file of shared memory, which is to have them. `check` is called before each read and may throw. Throws TENSOR_PAYLOAD of tensor `name` where the file ends before. */
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
