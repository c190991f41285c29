import t from 'tap'
import { createServer } from 'node:net'
import type { AddressInfo } from 'node:net'
import { checkPort, listenError } from '../../src/cli/check-port.ts'

t.test('a port in use is refused before anything is loaded, with advice', async t => {
  const server = createServer()
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  const { port } = server.address() as AddressInfo
  await t.rejects(checkPort('127.0.0.1', port), {
    code: 'CONFIG',
    param: '--port',
    message: `port ${port} of 127.0.0.1 is in use; stop what listens there, or choose another one with --port`
  })
  await new Promise(resolve => server.close(resolve))
  await t.resolves(checkPort('127.0.0.1', port), 'and the check leaves it free')
  await t.resolves(checkPort('127.0.0.1', port))
})

t.test('an address that is not ours is refused', async t => {
  await t.rejects(checkPort('192.0.2.1', 0), { code: 'CONFIG', param: '--host', message: /no network interface/ })
})

t.test("an unknown error keeps the system's message", async t => {
  const error = Object.assign(new Error('odd'), { code: 'EODD' })
  t.equal(listenError(error, 'h', 1), error)
})
