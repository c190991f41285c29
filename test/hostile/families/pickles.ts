import { assemble, bin, global, PROTO4, recordedPickles, str, u32, u64 } from '../../helpers/pickles.ts'
import { tensorEntry } from '../../../src/conformance/transports/pickle-writer.ts'
import type { Random } from '../lib/random.ts'
import type { Reply } from '../lib/target.ts'
import type { Family, World } from '../lib/world.ts'

/** Longest that a pickle may take, also on a busy machine; /health shows whether others wait meanwhile. */
const MOST_MS = 20_000
const OPCODES = 'N\x88\x89()]}.012abceghijloqrstuBCGJKMQRX\x80\x81\x82\x85\x86\x87\x8a\x8b\x8c\x8d' +
  '\x8e\x8f\x90\x91\x92\x93\x94\x95\x96\x97'

/** Pickles that would run something, that are larger than they look, or that are broken. */
export const pickles: Family = {
  name: 'pickles',
  attack: async (world, random) => {
    const exploits = recordedPickles('exploits')
    for (const { name, pickle } of random.some(exploits, 40)) await send(world, name, [pickle])
    for (const [name, pickle] of bombs()) await send(world, name, [pickle.toString('base64')])
    const real = [...recordedPickles('payloads'), ...recordedPickles('refused')]
      .flatMap(({ entries }) => entries)
      .map(entry => Buffer.from(entry, 'base64'))
    for (let i = 0; i < 60; i++) {
      const pickle = random.below(3) === 0 ? pieces(random) : random.damaged(random.pick(real), 1 + random.below(6))
      await send(
        world,
        'a damaged pickle',
        [pickle.toString('base64')],
        random.pick([null, 'flattened_bucket', 'direct'])
      )
    }
    await elsewhere(world, random, exploits.map(({ pickle }) => pickle))
    await noFile(world)
  }
}

async function send (world: World, name: string, entries: string[], loadFormat: string | null = null): Promise<void> {
  const reply = await world.open.call('/update_weights_from_tensor', {
    body: { serialized_named_tensors: entries, load_format: loadFormat }
  })
  refused(world, name, reply, entries)
}

function is4xx (status: number): boolean {
  return status >= 400 && status < 500
}

function refused (world: World, name: string, { status, text, ms }: Reply, entries: string[]): void {
  const shows = (): string =>
    `${name}: ${status} after ${ms.toFixed(0)} ms ${text.slice(0, 500)}; ${entries[0]?.slice(0, 600)}`
  // Damage may leave an empty list, which is an update of no tensors.
  const isEmpty = status === 200 && text.includes('"tensors":0,')
  world.check('a hostile pickle is refused with a 4xx, or has no tensors', isEmpty || is4xx(status), shows)
  world.check(`a pickle is refused within ${MOST_MS / 1000} s`, ms < MOST_MS, shows)
}

/** Small pickles that cost much to readers who are careless. */
function bombs (): [name: string, pickle: Buffer][] {
  const again = (opcodes: string, count: number): Buffer => Buffer.from(opcodes.repeat(count), 'latin1')
  const doubling = assemble(PROTO4, ']\x94', again('(h\x00h\x00h\x00h\x00t\x94', 200), '.')
  const local = global('sglang.srt.model_executor.model_runner', 'LocalSerializedTensor')
  let nested: Buffer = assemble(PROTO4, 'N.')
  for (let depth = 0; depth < 1500; depth++) {
    nested = assemble(PROTO4, local, ')\x81}', str('values'), ']', bin(nested), 'asb.')
  }
  return [
    ['a value in itself', assemble(PROTO4, ']\x94h\x00a.')],
    ['values that double', doubling],
    ['200,000 lists in each other', assemble(PROTO4, again(']', 200_000), again('a', 199_999), '.')],
    ['200,000 tuples in each other', assemble(PROTO4, 'N', again('\x85', 200_000), '.')],
    ['pickles in pickles', nested],
    ['a text of 4 GB', assemble(PROTO4, 'X', u32(0xffff_ffff), 'a.')],
    ['bytes of 2^63', assemble(PROTO4, '\x8e', u64(2n ** 63n), 'a.')],
    ['a frame of 2^63', assemble(PROTO4, '\x95', u64(2n ** 63n), 'N.')],
    ['an int of 2^31 bytes', assemble(PROTO4, '\x8b', u32(0x7fff_ffff), 'a.')],
    ['a memo of 2^32', assemble(PROTO4, 'Nr', u32(0xffff_ffff), '.')],
    ['a million marks', assemble(PROTO4, again('(', 1_000_000), '.')],
    ['a million values', assemble(PROTO4, '(', again('N', 1_000_000), 't.')],
    ['a million tensors of one', assemble(PROTO4, '(', again('N\x85', 500_000), 'l.')],
    ['no end', assemble(PROTO4, again('N0', 100_000))],
    ['nothing', Buffer.alloc(0)],
    ['only a protocol', assemble('\x80\xff.')]
  ]
}

function pieces (random: Random): Buffer {
  const parts = Array.from(
    { length: 1 + random.below(40) },
    () => random.below(3) === 0 ? random.bytes(random.below(6)) : Buffer.from(random.pick([...OPCODES]), 'latin1')
  )
  return Buffer.concat([Buffer.from(PROTO4, 'latin1'), ...parts, Buffer.from('.')])
}

/** The other routes whose bodies have pickles or base64. */
async function elsewhere (world: World, random: Random, exploits: readonly string[]): Promise<void> {
  const names = { names: ['a'], dtype_names: ['float32'], shapes: [[1]] }
  for (const pickle of random.some(exploits, 5)) {
    for (
      const [path, body] of [
        ['/update_weights', { update_info: { ...names, ipc_handles_pickled: pickle } }],
        ['/update_weights', { update_info: { ...names, ipc_handles: [pickle] } }],
        ['/collective_rpc', { method: 'update_weights_from_ipc', args: [pickle] }],
        ['/collective_rpc', { method: pickle, args: [] }],
        ['/areal_update_weights_tensor', {
          names: ['a'],
          weights: { a: { data: pickle, shape: [1], dtype: 'float32' } }
        }],
        ['/load_lora_adapter_from_tensors', { lora_name: 'a', serialized_tensors: pickle, config_dict: {} }],
        ['/init_weight_transfer_engine', { init_info: pickle }],
        ['/nemo-rl/refit/prepare', { tensors: pickle }]
      ] as const
    ) refused(world, path, await world.open.call(path, { body }), [pickle])
  }
}

/** Names of shared memory that lead elsewhere, are links or FIFOs, or whose sockets are others'. */
async function noFile (world: World): Promise<void> {
  const memory = [
    '/../../etc/passwd',
    '/../tmp/x',
    '/.',
    '//etc/passwd',
    '/nothing',
    '',
    '/a\0b',
    `/${'a'.repeat(300)}`
  ]
  for (const name of memory) {
    for (const manager of [undefined, '/etc/passwd', '/dev/null', `/tmp/${'a'.repeat(200)}`]) {
      const tensor = { name: 'model.norm.weight', memory: { name, bytes: 2 ** 40 }, shape: [64] }
      const entry = tensorEntry([{ ...tensor, ...manager === undefined ? {} : { manager } }])
      await send(world, `memory ${JSON.stringify(name)} of ${manager}`, [entry])
    }
  }
}
