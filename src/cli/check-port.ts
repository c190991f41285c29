import { createServer } from 'node:net'
import { RefitError } from '../errors.ts'

/** Fails now, instead of after minutes of loading, if the address cannot be listened on. */
export async function checkPort (host: string, port: number): Promise<void> {
  const server = createServer()
  await new Promise<void>((resolve, reject) => {
    server.once('error', reject)
    server.listen({ host, port }, resolve)
  })
    .catch((error: NodeJS.ErrnoException) => {
      throw listenError(error, host, port)
    })
  await new Promise(resolve => server.close(resolve))
}

/** The system's message, with the cure. */
export function listenError (error: NodeJS.ErrnoException, host: string, port: number): Error {
  const reasons: Record<string, string> = {
    EADDRINUSE: `port ${port} of ${host} is in use; stop what listens there, or choose another one with --port`,
    EACCES: `port ${port} needs more rights than this process has; choose one from 1024 up with --port`,
    EADDRNOTAVAIL: `no network interface of this machine has the address ${host}; choose another one with --host`,
    ENOTFOUND: `the host name ${host} is not known; give an address with --host`
  }
  const reason = reasons[error.code ?? '']
  return reason === undefined
    ? error
    : new RefitError('CONFIG', reason, {
      param: error.code === 'EADDRINUSE' || error.code === 'EACCES' ? '--port' : '--host',
      cause: error
    })
}
