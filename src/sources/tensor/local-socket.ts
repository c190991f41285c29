import { Socket } from 'node:net'
import { getSystemErrorName } from 'node:util'
import { native } from '../../native/load-addon.ts'

/**
 * Connects to a Unix socket of this machine, also an abstract one (`\0name`). If no process accepts, throws an error
 * with the system's code at once.
 */
export function connectLocalSocket (path: string): Socket {
  const fd = native().connectLocal(path)
  if (fd >= 0) return new Socket({ fd, readable: true, writable: true })
  const code = getSystemErrorName(fd)
  throw Object.assign(
    new Error(
      code === 'EACCES'
        ? 'it belongs to another user, or its permissions keep this one out: run both as one user'
        : `it cannot be connected to (${code})`
    ),
    { code }
  )
}
