import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import type { Random } from '../lib/random.ts'
import { RawClient } from '../lib/raw.ts'
import type { Family, World } from '../lib/world.ts'

const PATH = '/update_weights_from_tensor'
const BINARY = { 'content-type': 'application/octet-stream' }
const EDGE = 'hostile-edge'

/** Uploads of weights that lie about themselves, or stop in the middle. */
export const uploads: Family = {
  name: 'uploads',
  attack: async (world, random) => {
    const good = readFileSync(join(world.folder, 'outside', 'adder', 'model.safetensors'))
    for (const [name, bytes] of lies(good, random)) await refused(world, name, bytes)
    for (let i = 0; i < 20; i++) {
      // The first bytes are the header: a change in the tensors would be an update like any other.
      const size = 8 + Number(good.readBigUInt64LE(0))
      const damaged = Buffer.concat([random.damaged(good.subarray(0, size), 1 + random.below(3)), good.subarray(size)])
      // A digit of the metadata or a space may change nothing that is read.
      if (readable(damaged) !== readable(good)) await refused(world, `damage ${i}`, damaged)
    }
    for (const [name, type, body] of forms(good)) await refused(world, name, body, { 'content-type': type })
    await Promise.all(Array.from({ length: 12 }, async () => await stops(world, good, random)))
    await stageEmpty(world)
  }
}

async function refused (
  world: World,
  name: string,
  body: Uint8Array,
  headers: Record<string, string> = BINARY
): Promise<void> {
  const reply = await world.open.call(PATH, { body, headers })
  world.check(
    'a lying upload is refused with a 4xx',
    reply.status >= 400 && reply.status < 500,
    () => `${name}: ${reply.status} ${reply.text.slice(0, 500)}`
  )
}

/** The header as it is read; null if it is none. */
function readable (file: Buffer): string | null {
  try {
    const { __metadata__: _, ...tensors } = JSON.parse(file.toString('utf8', 8, 8 + Number(file.readBigUInt64LE(0))))
    return JSON.stringify(tensors)
  } catch {
    return null
  }
}

function withHeader (header: string | object, data: Uint8Array = Buffer.alloc(0), length?: bigint): Buffer {
  const text = Buffer.from(typeof header === 'string' ? header : JSON.stringify(header))
  const size = Buffer.alloc(8)
  size.writeBigUInt64LE(length ?? BigInt(text.length))
  return Buffer.concat([size, text, data])
}

function lies (good: Buffer, random: Random): [name: string, bytes: Buffer][] {
  const size = Number(good.readBigUInt64LE(0))
  const header = JSON.parse(good.toString('utf8', 8, 8 + size)) as Record<string, any>
  const data = good.subarray(8 + size)
  const names = Object.keys(header).filter(name => name !== '__metadata__')
  const name = random.pick(names)
  const other = names.find(found => found !== name)!
  const change = (fields: object): Buffer => withHeader({ ...header, [name]: { ...header[name], ...fields } }, data)
  const text = JSON.stringify(header)
  return [
    ['nothing', Buffer.alloc(0)],
    ['seven bytes', good.subarray(0, 7)],
    ['a header of 2^63', withHeader(text, data, 2n ** 63n)],
    ['a header of 2^64 - 1', withHeader(text, data, 2n ** 64n - 1n)],
    ['a header of 1 GB', withHeader(text, data, 1n << 30n)],
    ['a header longer than the file', withHeader(text, Buffer.alloc(0), BigInt(good.length))],
    ['an empty header', withHeader('', data)],
    ['a header of brackets', withHeader('['.repeat(1_000_000), data)],
    ['a header of nested objects', withHeader('{"a":'.repeat(200_000), data)],
    ['no tensors', withHeader({})],
    ['only metadata', withHeader({ __metadata__: { a: 'b' } })],
    [
      'one tensor',
      withHeader({
        [name]: {
          ...header[name],
          data_offsets: [
            0,
            header[name].data_offsets[1] -
            header[name].data_offsets[0]
          ]
        }
      }, data.subarray(...header[name].data_offsets as [number, number]))
    ],
    ['a name twice', withHeader(text.replace(`"${other}"`, `"${name}"`), data)],
    ['an unknown dtype', change({ dtype: 'F7' })],
    ['a dtype as a number', change({ dtype: 7 })],
    ['another dtype', change({ dtype: 'F64' })],
    ['a shape of 2^53', change({ shape: [2 ** 53, 2 ** 53] })],
    ['a negative shape', change({ shape: [-1, -1] })],
    ['a shape of halves', change({ shape: [0.5] })],
    ['100,000 dimensions', change({ shape: Array(100_000).fill(1) })],
    ['offsets beyond the end', change({ data_offsets: [0, 2 ** 52] })],
    ['offsets in reverse', change({ data_offsets: [8, 0] })],
    ['offsets that overlap', change({ data_offsets: header[other].data_offsets })],
    ['negative offsets', change({ data_offsets: [-8, 0] })],
    ['offsets as texts', change({ data_offsets: ['0', '8'] })],
    ['__proto__', withHeader(`{"__proto__":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, Buffer.alloc(4))],
    [
      'a long name',
      withHeader({ ['a'.repeat(1_000_000)]: { dtype: 'F32', shape: [1], data_offsets: [0, 4] } }, Buffer.alloc(4))
    ],
    [
      '100,000 tensors',
      withHeader(Object.fromEntries(Array
        .from({ length: 100_000 }, (_, i) => [`t${i}`, { dtype: 'F32', shape: [0], data_offsets: [0, 0] }])))
    ],
    ['less data than stated', good.subarray(0, good.length - 1 - random.below(1000))],
    ['more data than stated', Buffer.concat([good, random.bytes(100)])],
    ['bytes', random.bytes(5000)]
  ]
}

function forms (good: Buffer): [name: string, type: string, body: Buffer][] {
  const type = `multipart/form-data; boundary=${EDGE}`
  const part = (headers: string, body: Uint8Array | string): Buffer =>
    Buffer.concat([Buffer.from(`--${EDGE}\r\n${headers}\r\n\r\n`), Buffer.from(body as string), Buffer.from('\r\n')])
  const file = (name: string, bytes: Uint8Array): Buffer =>
    part(
      `content-disposition: form-data; name="file"; filename="${name}"\r\ncontent-type: application/octet-stream`,
      bytes
    )
  const field = (name: string, value: string): Buffer => part(`content-disposition: form-data; name="${name}"`, value)
  const end = Buffer.from(`--${EDGE}--\r\n`)
  return [
    ['no boundary', 'multipart/form-data', Buffer.concat([file('a', good), end])],
    ['another boundary', 'multipart/form-data; boundary=x', Buffer.concat([file('a', good), end])],
    ['a long boundary', `multipart/form-data; boundary=${'x'.repeat(5000)}`, good],
    ['no end', type, file('a', good.subarray(0, 5000))],
    ['no file', type, Buffer.concat([field('weight_version', 'x'), end])],
    ['an empty form', type, end],
    ['10,000 fields', type, Buffer.concat([...Array.from({ length: 10_000 }, (_, i) => field(`f${i}`, 'x')), end])],
    ['a long field', type, Buffer.concat([field('weight_version', 'x'.repeat(2_000_000)), file('a', good), end])],
    ['a bad field', type, Buffer.concat([field('mode', 'hurt'), file('a', good), end])],
    ['headers without end', type, Buffer.concat([Buffer.from(`--${EDGE}\r\n`), Buffer.alloc(1_000_000, 'a')])],
    ['the same file twice', type, Buffer.concat([file('a', good), file('b', good), end])],
    ['a file of elsewhere', type, Buffer.concat([file('../../../etc/passwd', Buffer.from('x')), end])]
  ]
}

/** Stops after a part of a good file: waits, leaves, or resets. */
async function stops (world: World, good: Buffer, random: Random): Promise<void> {
  const client = await RawClient.open(world.open.port)
  const isChunked = random.below(2) === 0
  const part = good.subarray(0, random.below(good.length))
  client.send(
    `POST ${PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n` +
      (isChunked
        ? `transfer-encoding: chunked\r\n\r\n${part.length.toString(16)}\r\n`
        : `content-length: ${good.length}\r\n\r\n`)
  )
  client.send(part)
  const way = random.below(3)
  if (way === 0) {
    await Promise.race([client.closed, new Promise(resolve => setTimeout(resolve, 60_000))])
    world.check(
      'an upload that stops is refused and closed',
      client.socket.destroyed &&
        client.statuses.every(status => status >= 400 && status < 500),
      () => client.text.slice(0, 500)
    )
  } else if (way === 1) client.end()
  else client.socket.resetAndDestroy()
}

async function stageEmpty (world: World): Promise<void> {
  const staged = async (): Promise<string | undefined> =>
    /^refit:upload_staging_bytes\{.*\} (\d+)$/m.exec((await world.open.call('/metrics')).text)?.[1]
  for (let tries = 0; tries < 300 && await staged() !== '0'; tries++) {
    await new Promise(resolve => setTimeout(resolve, 100))
  }
  const left = await staged()
  world.check('no bytes of uploads stay in memory', left === '0', () => `${left} bytes`)
}
