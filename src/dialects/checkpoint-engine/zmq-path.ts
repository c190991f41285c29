import { RefitError } from '../../errors.ts'

const SCHEME = 'ipc://'
/** Size of sun_path, without the byte that begins an abstract name or ends a path. */
const MAX_BYTES = 107

/**
 * The Unix socket of a ZeroMQ endpoint: `ipc://@name` is the abstract socket of that name (`\0name`), `ipc:///path` a
 * socket in the file system. Throws INVALID_REQUEST for all other endpoints, such as `tcp://`.
 */
export function socketOf (endpoint: string): string {
  const refusal = (why: string): RefitError =>
    new RefitError('INVALID_REQUEST', `the ZeroMQ endpoint ${JSON.stringify(endpoint.slice(0, 200))} ${why}`, {
      param: 'zmq_handles'
    })
  if (!endpoint.startsWith(SCHEME)) throw refusal('is not one of the same machine: ipc://@name or ipc:///path')
  const name = endpoint.slice(SCHEME.length)
  if (!/^[\x21-\x7e]+$/.test(name)) throw refusal("has characters that a socket's name does not have")
  if (name.length > MAX_BYTES) throw refusal(`is longer than ${MAX_BYTES} bytes`)
  if (name.startsWith('@') && name.length > 1) return `\0${name.slice(1)}`
  if (!name.startsWith('/')) throw refusal('is not one of the same machine: ipc://@name or ipc:///path')
  // Whether a file is there is not checked: the reply would tell callers.
  return name
}
