import { createServer } from 'node:net'
import type { AddressInfo, Socket } from 'node:net'
import type { Test } from 'tap'

export interface TcpScript {
  port: number
  /** Number of connections so far, and of open ones. */
  count: number
  open: Set<Socket>
  /** Everything received, of all connections. */
  received: Buffer[]
}

/** A server on the loopback that runs the test's script with each connection and all its bytes so far. */
export async function tcpScript (
  t: Test,
  data: (socket: Socket, bytes: Buffer, connection: number) => void,
  connected: (socket: Socket, connection: number) => void = () => {}
): Promise<TcpScript> {
  const script: TcpScript = { port: 0, count: 0, open: new Set(), received: [] }
  const server = createServer(socket => {
    const connection = script.count++
    let bytes = Buffer.alloc(0)
    script.open.add(socket)
    socket
      .on('close', () => {
        script.open.delete(socket)
      })
      .on('error', () => {})
      .on('data', chunk => {
        script.received.push(chunk)
        bytes = Buffer.concat([bytes, chunk])
        data(socket, bytes, connection)
      })
    connected(socket, connection)
  })
  await new Promise<void>(resolve => {
    server.listen(0, '127.0.0.1', resolve)
  })
  script.port = (server.address() as AddressInfo).port
  t.teardown(async () => {
    for (const socket of script.open) socket.destroy()
    await new Promise(resolve => {
      server.close(resolve)
    })
  })
  return script
}

/** Resolves when `is` returns true; otherwise the test ends at its time limit. */
export async function until (is: () => boolean): Promise<void> {
  while (!is()) await new Promise(resolve => setTimeout(resolve, 2))
}

/**
 * Resolves when no socket and no timer keeps the process alive. If one stays forever, the test ends at its time limit.
 */
export async function nothingOpen (): Promise<void> {
  await until(() => !process.getActiveResourcesInfo().some(type => type === 'Timeout' || type.startsWith('TCPSocket')))
}
