import { createServer } from 'node:net'
import type { AddressInfo, Socket } from 'node:net'
import type { Test } from 'tap'

export interface TcpScript {
  port: number
  /** Connections so far, and those that are open. */
  count: number
  open: Set<Socket>
  /** Everything that has come, of all connections. */
  received: Buffer[]
}

/**
 * A server on the loopback that does what the test says with each connection, and with all bytes that it has had so
 * far.
 */
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

/** Resolves when `is` holds; a test for which it never does ends by its time limit. */
export async function until (is: () => boolean): Promise<void> {
  while (!is()) await new Promise(resolve => setTimeout(resolve, 2))
}

/**
 * Resolves when no socket and no timer keeps the process alive; one that is left for good ends the test by its time
 * limit.
 */
export async function nothingOpen (): Promise<void> {
  await until(() => !process.getActiveResourcesInfo().some(type => type === 'Timeout' || type.startsWith('TCPSocket')))
}
