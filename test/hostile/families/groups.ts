import { createServer } from 'node:net'
import type { AddressInfo, Socket } from 'node:net'
import { GroupTrainer } from '../../helpers/group-trainer.ts'
import type { SentTensor } from '../../helpers/group-trainer.ts'
import type { StoreClient } from '../../../src/rendezvous/client.ts'
import { StoreServer } from '../../../src/rendezvous/server.ts'
import type { Random } from '../lib/random.ts'
import type { Family, World } from '../lib/world.ts'

/** Longest that a refusal may take: --group-timeout of the servers is 2 s, for each of a few steps. */
const MOST_MS = 30_000
const INIT = '/init_weights_update_group'
const UPDATE = '/update_weights_from_distributed'

/** Peers of process groups that lie, send half of a handshake, or never come. */
export const groups: Family = {
  name: 'groups',
  attack: async (world, random) => {
    await Promise.all(masters(random).map(async ([name, behave]) => await lyingMaster(world, name, behave)))
    for (const body of badInits(random)) await badInit(world, body)
    await Promise.all(['nobody', 'garbage', 'half', 'silence'].map(async kind => await lyingPeer(world, random, kind)))
    await badBroadcasts(world, random)
    await none(world)
  }
}

/** Processes that listen where a trainer's store should be. */
function masters (random: Random): [name: string, behave: (socket: Socket) => void][] {
  const noise = random.bytes(4000)
  return [
    ['silence', () => {}],
    ['an end', socket => socket.end()],
    ['a reset', socket => socket.resetAndDestroy()],
    ['bytes', socket => socket.write(noise)],
    ['bytes after each request', socket => socket.on('data', () => socket.write(noise))],
    ['lengths of 2^63', socket => socket.on('data', () => socket.write(Buffer.alloc(64, 0x7f)))],
    ['zeroes', socket => socket.on('data', () => socket.write(Buffer.alloc(64)))],
    ['an echo', socket => socket.on('data', data => socket.write(data))],
    ['HTTP', socket => socket.on('data', () => socket.end('HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n'))],
    ['bytes without end', socket => {
      const timer = setInterval(() => socket.write(Buffer.alloc(1 << 16, 1)), 5)
      socket.on('close', () => clearInterval(timer))
    }],
    ['a byte now and then', socket => {
      const timer = setInterval(() => socket.write('\x01'), 100)
      socket.on('close', () => clearInterval(timer))
    }]
  ]
}

async function lyingMaster (world: World, name: string, behave: (socket: Socket) => void): Promise<void> {
  const open = new Set<Socket>()
  const server = createServer(socket => {
    open.add(socket)
    socket.on('error', () => {})
    behave(socket)
  })
  await new Promise<void>(resolve => server.listen(0, '127.0.0.1', resolve))
  const { port } = server.address() as AddressInfo
  await lied(world, `a master that sends ${name}`, init(port, { group_name: `master-${name.replaceAll(' ', '-')}` }))
  for (const socket of open) socket.destroy()
  server.close()
}

function init (port: number, more: object = {}): Record<string, unknown> {
  return {
    master_address: '127.0.0.1',
    master_port: port,
    rank_offset: 1,
    world_size: 2,
    group_name: 'hostile',
    backend: 'gloo',
    ...more
  }
}

/**
 * The init of a group with a liar. It may be answered before anybody has connected, as torch's is: then an update in
 * the group is refused.
 */
async function lied (world: World, name: string, body: Record<string, unknown>): Promise<void> {
  const { status, text, ms } = await world.open.call(INIT, { body, timeoutMs: 4 * MOST_MS })
  world.check(
    `the init of a group with a liar is answered within ${MOST_MS / 1000} s`,
    status >= 200 && status !== 500 && ms < MOST_MS,
    () => `${name}: ${status} after ${ms.toFixed(0)} ms ${text}`
  )
  if (status === 200) {
    const update = { names: ['model.norm.weight'], dtypes: ['bfloat16'], shapes: [[64]], group_name: body.group_name }
    await refused(world, `an update from ${name}`, UPDATE, update)
  }
  await world.open.call('/destroy_weights_update_group', { body: { group_name: body.group_name } })
}

async function refused (world: World, name: string, path: string, body: object): Promise<void> {
  const { status, text, ms } = await world.open.call(path, { body, timeoutMs: 4 * MOST_MS })
  const shows = (): string => `${name}: ${status} after ${ms.toFixed(0)} ms ${text.slice(0, 500)}`
  world.check('a lie in a group is refused', status >= 400 && status !== 500 && status < 600, shows)
  world.check(`a lie in a group is refused within ${MOST_MS / 1000} s`, ms < MOST_MS, shows)
}

function badInits (random: Random): object[] {
  return [
    { master_address: '169.254.169.254' },
    { master_address: 'metadata.google.internal' },
    { master_address: '0.0.0.0' },
    { master_address: '8.8.8.8' },
    { master_address: '[::ffff:169.254.169.254]' },
    { master_address: 'localhost\r\nhost: x' },
    { master_address: 'a'.repeat(5000) },
    { master_port: 0 },
    { master_port: 65_536 },
    { master_port: -1 },
    { world_size: 2 ** 31 },
    { world_size: 65_535 },
    { world_size: 1 },
    { rank_offset: 2 ** 31 },
    { rank_offset: -1 },
    { group_name: '' },
    { group_name: 'a'.repeat(100_000) },
    { backend: 'hurt' },
    { backend: '../nccl' }
  ]
    .map(change => init(1 + random.below(1000), change))
}

async function badInit (world: World, body: object): Promise<void> {
  await refused(world, JSON.stringify(body).slice(0, 200), INIT, body)
}

/** A real store in which the other rank's address leads to nobody, or to somebody who is no rank. */
async function lyingPeer (world: World, random: Random, kind: string): Promise<void> {
  const noise = random.bytes(5000)
  const peer = createServer(socket => {
    socket.on('error', () => {})
    if (kind === 'garbage') socket.write(noise)
    else if (kind === 'half') socket.write(Buffer.alloc(3))
  })
  await new Promise<void>(resolve => peer.listen(0, '127.0.0.1', resolve))
  const { port } = peer.address() as AddressInfo
  if (kind === 'nobody') peer.close()
  const store = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  store.countWorkers(1)
  const client = await store.connect()
  const name = `peer-${kind}`
  const joining = lied(world, name, init(store.address.port, { group_name: name }))
  // The rank's own address, changed so that it leads to `peer`.
  for (const key of await keysOf(client)) {
    const lie = Buffer.from(await client.get(key, { timeoutMs: 5000 }))
    for (let at = 0; at + 4 <= lie.length; at++) {
      // sockaddr_in: family 2 in the machine's order, then the port in the network's.
      if (lie[at] === 2 && lie[at + 1] === 0) lie.writeUInt16BE(port, at + 2)
    }
    await client.set(key.replace(/1$/, '0'), lie, { timeoutMs: 5000 }).catch(() => {})
  }
  await joining
  client.close()
  await store.close()
  if (kind !== 'nobody') peer.close()
}

/** The keys of the store once the engine has written its address; empty if it never does. */
async function keysOf (store: StoreClient): Promise<string[]> {
  for (let tries = 0; tries < 100; tries++) {
    const keys = (await store.listKeys() ?? []).filter(key => /\/1$/.test(key)).map(key => key.slice(1))
    if (keys.length > 0) return keys
    await new Promise(resolve => setTimeout(resolve, 20))
  }
  return []
}

/** Trainers that joined and then lie about what they send, or leave in the middle. */
async function badBroadcasts (world: World, random: Random): Promise<void> {
  const norm: SentTensor = { name: 'model.norm.weight', dtype: 'bfloat16', shape: [64], data: Buffer.alloc(128, 1) }
  const cases: [name: string, tensors: SentTensor[], fields: object, send: (trainer: GroupTrainer) => Promise<void>][] =
    [
      ['an unknown name', [{ ...norm, name: 'a' }], {}, async trainer => await trainer.broadcast(norm.data)],
      ['unequal lists', [norm], { shapes: [] }, async () => {}],
      ['a huge shape', [{ ...norm, shape: [2 ** 40] }], {}, async trainer => await trainer.kill()],
      ['an unknown dtype', [{ ...norm, dtype: 'bfloat17' }], {}, async () => {}],
      ['a trainer that leaves', [norm], {}, async trainer => await trainer.kill()],
      [
        'fewer bytes',
        [norm],
        {},
        async trainer => await trainer.broadcast(norm.data.subarray(0, 1 + random.below(100)))
      ],
      ['more bytes', [norm], {}, async trainer => await trainer.broadcast(Buffer.alloc(4096, 1))],
      ['no bytes', [norm], {}, async () => {}],
      ['another group', [norm], { group_name: 'nobody' }, async () => {}]
    ]
  for (const [name, tensors, fields, send] of cases) {
    const trainer = await GroupTrainer.start({ size: 2, name: `broadcast-${name.replaceAll(' ', '-')}` })
    const [joined] = await Promise.all([
      world.open.call(INIT, { body: trainer.init() }),
      trainer.join(20_000).catch(() => {})
    ])
    world.check('an honest trainer joins between the lies', joined.status === 200, () => `${name}: ${joined.text}`)
    const sending = send(trainer).catch(() => {})
    await refused(world, `a broadcast with ${name}`, UPDATE, trainer.update(tensors, fields as Record<string, unknown>))
    await trainer.kill().catch(() => {})
    await sending
    await world.open.call('/destroy_weights_update_group', { body: { group_name: trainer.name } })
  }
}

async function none (world: World): Promise<void> {
  const groups = async (): Promise<unknown[]> =>
    (JSON.parse((await world.open.call('/server_info')).text) as { weight_groups: unknown[] }).weight_groups
  for (let tries = 0; tries < 100 && (await groups()).length > 0; tries++) {
    await new Promise(resolve => setTimeout(resolve, 100))
  }
  const left = await groups()
  world.check('no group of a liar is left', left.length === 0, () => JSON.stringify(left))
}
