import { createSocket } from 'node:dgram'

/** The address of this machine by which the one at `where` (`10.0.0.7:29500`, `[fd00::7]:29500`) reaches it. Nothing is sent: a datagram socket that is connected knows its own. */
export async function localAddress (where: string): Promise<string> {
  const [, host = '', port = ''] = /^\[?(.*?)\]?:(\d+)$/.exec(where) ?? []
  const socket = createSocket(host.includes(':') ? 'udp6' : 'udp4')
  try {
    await new Promise<void>((resolve, reject) => {
      socket.once('error', reject)
      // Node's types give the callback no argument; it has one where there is no way to the host.
      socket.connect(
        Number(port),
        host,
        ((error?: Error | null) => {
          error == null ? resolve() : reject(error)
        }) as () => void
      )
    })
    return socket.address().address
  } finally {
    socket.close()
  }
}
