import { createSocket } from 'node:dgram'

/**
 * The address of this machine that the host at `where` (`10.0.0.7:29500`, `[fd00::7]:29500`) can reach. Nothing is
 * sent: connecting a datagram socket only chooses its local address.
 */
export async function localAddress (where: string): Promise<string> {
  const [, host = '', port = ''] = /^\[?(.*?)\]?:(\d+)$/.exec(where) ?? []
  const socket = createSocket(host.includes(':') ? 'udp6' : 'udp4')
  try {
    await new Promise<void>((resolve, reject) => {
      socket.once('error', reject)
      // Node passes an error if there is no route to the host; its types leave the argument out.
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
