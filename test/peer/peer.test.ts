import t from 'tap'
import type { Test } from 'tap'
import { createServer } from 'node:http'
import type { RequestListener } from 'node:http'
import type { AddressInfo } from 'node:net'
import { isLater, Peer } from '../../src/peer/peer.ts'
import { RefitError } from '../../src/errors.ts'

async function peerOf (t: Test, listener: RequestListener, path = '', key?: string): Promise<Peer> {
  const server = createServer(listener)
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  const peer = new Peer(`http://127.0.0.1:${(server.address() as AddressInfo).port}${path}`, key)
  t.teardown(async () => {
    await peer.close()
    server.closeAllConnections()
    server.close()
  })
  return peer
}

async function failure (promise: Promise<unknown>): Promise<RefitError> {
  const error = await promise.then(() => undefined, (error: unknown) => error)
  if (error instanceof RefitError) return error
  throw new Error(`expected a RefitError, got ${String(error)}`)
}

const replies = (status: number, body: string): RequestListener => (_request, reply) => {
  reply.writeHead(status, { 'content-type': 'application/json' }).end(body)
}

t.test('every call carries the key, and a path in the URL prefixes all routes', async t => {
  const seen: unknown[] = []
  const peer = await peerOf(
    t,
    (request, reply) => {
      seen.push([request.url, request.headers.authorization])
      reply.end('{"server": "refit", "protocol": 1}')
    },
    '/rollout/',
    'secret'
  )
  t.match(await peer.info(), { protocol: 1 })
  t.same(seen, [['/rollout/remote_instance_weights_info', 'Bearer secret']])
})

t.test('another kind of server is reported', async t => {
  for (
    const listener of [
      replies(200, '<html>'),
      replies(200, '{"server": "other"}'),
      replies(200, 'null'),
      replies(404, '{"detail": "Not Found"}')
    ]
  ) {
    const error = await failure((await peerOf(t, listener)).info())
    t.match(error, {
      code: 'ENGINE_FAILED',
      message: /cannot send weights to this engine.*--load-from takes the URL of a refit server/
    })
    t.notOk(isLater(error))
  }
  const error = await failure(new Peer('http://127.0.0.1:1').info())
  t.match(error, { code: 'ENGINE_FAILED', message: /no refit server answers at http:\/\/127.0.0.1:1 .*ECONNREFUSED/ })
})

t.test('a wrong key is a CONFIG error, a refused address is not', async t => {
  t.match(await failure((await peerOf(t, replies(401, '{"error": "Unauthorized"}'))).info()), {
    code: 'CONFIG',
    message: /refuses.*REFIT_LOAD_FROM_KEY/
  })
  const refused = await peerOf(
    t,
    replies(
      403,
      '{"success": false, "message": "not that", "error": {"message": "not that", "code": "MASTER_REFUSED"}}'
    )
  )
  t.match(await failure(refused.info()), { code: 'MASTER_REFUSED', message: /not that/ })
})

t.test('a peer that may be ready later differs from one that never will be', async t => {
  for (
    const [status, body] of [[503, 'starting'], [503, '{"error": {"message": "torn", "code": "ENGINE_TORN"}}'], [
      409,
      '{"success": false, "message": "open", "error": {"message": "open", "code": "TRANSACTION_OPEN"}}'
    ]] as const
  ) {
    t.ok(isLater(await failure((await peerOf(t, replies(status, body))).info())), body)
  }
  const never = await failure(
    (await peerOf(
      t,
      replies(
        400,
        '{"success": false, "message": "bad ports", "error": {"message": "bad ports", "code": "INVALID_REQUEST"}}'
      )
    ))
      .info()
  )
  t.match(never, { code: 'ENGINE_FAILED', message: /answered 400 .*bad ports/ })
  t.notOk(isLater(never))
})

t.test('an invalid URL, and a URL with a key in it, are refused', async t => {
  for (const url of ['10.0.0.7:30000', 'ftp://x', 'nonsense', '']) {
    t.throws(() => new Peer(url), { code: 'CONFIG', message: /--load-from: expected the URL/ })
  }
  t.throws(() => new Peer('http://user:secret@h:1'), { code: 'CONFIG', message: /--load-from-key/ })
})
