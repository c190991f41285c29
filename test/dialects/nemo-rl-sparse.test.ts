import { once } from 'node:events'
import { createServer } from 'node:http'
import type { ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import t from 'tap'
import { readS3Object } from '../../src/sources/disk/s3-object.ts'
import { engineServer, modelFolder } from '../helpers/gateway.ts'

t.test('a payload that still loads when the trainer prepares again does not block its key', async t => {
  const asked: ServerResponse[] = []
  const store = createServer((_, response) => {
    asked.push(response)
    // The first read hangs.
    if (asked.length > 1) response.writeHead(404).end()
  })
    .listen(0, '127.0.0.1')
  await once(store, 'listening')
  t.teardown(() => {
    delete process.env['AWS_ENDPOINT_URL']
    store.closeAllConnections()
    store.close()
  })
  process.env['AWS_ENDPOINT_URL'] = `http://127.0.0.1:${(store.address() as AddressInfo).port}`
  const { url } = await engineServer(t, modelFolder(t), {})
  const post = async (route: string, body: object): Promise<{ status: number, body: any }> => {
    const reply = await fetch(`${url}/nemo-rl/refit/${route}`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(body)
    })
    return { status: reply.status, body: await reply.json() }
  }
  const prepare = async (): Promise<void> => {
    t.match(await post('prepare', { tensors: { 'model.norm.weight': [[96], 'float32'] } }), { status: 200 })
  }
  const take = async (checksum: string): ReturnType<typeof post> =>
    await post('s3-manifest', { bucket: 'bucket', region: 'r1', key: 'step_1/0.bin', checksum })
  await prepare()
  const requested = once(store, 'request')
  const first = take('00'.repeat(16))
  await requested
  await prepare()
  t.match(await take('11'.repeat(16)), { status: 400, body: { error: /answers 404/ } }, 'it is read')
  asked[0]!.writeHead(404).end()
  t.match(await first, { body: { ok: false } })
})

t.test('errors of the S3 store are reported, and redirects to another host are refused', async t => {
  let status = 0
  const store = createServer((_, response) => {
    response.writeHead(status, { location: 'http://127.0.0.1:1/' }).end(
      '<Error><Code>Why</Code><Message>the reason</Message></Error>'
    )
  })
    .listen(0, '127.0.0.1')
  await once(store, 'listening')
  t.teardown(() => {
    store.close()
  })
  const env = { AWS_ENDPOINT_URL: `http://127.0.0.1:${(store.address() as AddressInfo).port}` }
  for (
    const [code, statuses] of [['INVALID_REQUEST', [301, 400, 403, 404]], ['STORE_UNREACHABLE', [
      307,
      429,
      500,
      503
    ]]] as const
  ) {
    for (status of statuses) {
      await t.rejects(readS3Object({ bucket: 'bucket', region: 'r1', key: 'k' }, 1, { env }), {
        code,
        message: new RegExp(`answers ${status}: Why, the reason`)
      }, `${status}`)
    }
  }
})
