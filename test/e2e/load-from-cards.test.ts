import t from 'tap'
import type { Test } from 'tap'
import { spawnSync } from 'node:child_process'
import { join } from 'node:path'
import { createEngine } from '../../src/app/create-engine.ts'
import type { EngineOptions } from '../../src/app/create-engine.ts'
import { packageRoot } from '../../src/root.ts'
import { answers, bareFolder, member, serve, SMALL } from '../helpers/load-from.ts'
import type { Member } from '../helpers/load-from.ts'

// Engines on GPUs that load from other engines. All code is the shipped code, except two stand-ins: CUDA's own calls
// compute on the CPU, and native/test/nccl_loop.cc has NCCL's interface.

process.env.REFIT_NATIVE = join(packageRoot, 'build/faults/refit.node')
process.env.REFIT_CUDA_LIBRARY = join(packageRoot, 'build/stand-in/librefit_cuda.so')
process.env.REFIT_STAND_IN_CARDS = '4'

const loop = join(t.testdir(), 'loop.so')
const { status, stderr } = spawnSync(process.env.CXX ?? 'g++', [
  '-std=c++20',
  '-O1',
  '-I',
  join(packageRoot, 'native'),
  '-shared',
  '-fPIC',
  '-fvisibility=hidden',
  join(packageRoot, 'native/test/nccl_loop.cc'),
  '-o',
  loop,
  '-pthread'
], { encoding: 'utf8' })
if (status !== 0) throw new Error(stderr)

const cards = (first: number, tp: number): EngineOptions => ({
  device: 'cuda',
  baseGpuId: first,
  tp,
  maxTotalTokens: 4096
})

async function filled (
  t: Test,
  peer: Member,
  options: EngineOptions,
  pieceBytes?: number
): Promise<{ one: Member, line: string }> {
  const lines: string[] = []
  const engine = await createEngine(bareFolder(t, 'adder'), {
    ...SMALL,
    ...options,
    loadFrom: {
      url: peer.url,
      ncclPath: loop,
      timeoutMs: 60_000,
      log: line => {
        lines.push(line)
      },
      ...pieceBytes === undefined ? {} : { pieceBytes }
    }
  })
  t.equal(lines.length, 1)
  return { one: await member(t, engine), line: lines[0]! }
}

for (const [from, to, pieceBytes] of [[1, 1], [2, 2], [1, 2, 20_000], [2, 1, 20_000]] as const) {
  t.test(`between GPUs, from tp ${from} to tp ${to}, the weights go over NCCL while the peer generates`, async t => {
    const peer = await serve(t, 'adder', { ...cards(0, from), weightVersion: 'v3' }, { ncclPath: loop })
    const over = new AbortController()
    const generating = (async () => {
      const first = await answers(peer)
      while (!over.signal.aborted) t.same(await answers(peer), first)
    })()
    const { one, line } = await filled(t, peer, cards(from, to), pieceBytes)
    over.abort()
    await generating
    t.match(line, /over nccl, because both engines are on GPUs/)
    t.equal(one.engine.weightVersion, 'v3')
    t.same(await one.sums(), await peer.sums())
    t.same(await answers(one), await answers(peer))
  })
}

t.test('between a GPU and the CPU, and between two engines on one GPU, whole tensors go over gloo', async t => {
  const host = await serve(t, 'adder', { tp: 2 })
  const { one, line } = await filled(t, host, cards(0, 2), 20_000)
  t.match(line, /over gloo, because this engine is on GPUs, the other on the CPU; whole tensors/)
  t.same(await one.sums(), await host.sums())
  const same = await filled(t, one, cards(0, 1))
  t.match(same.line, /over gloo, because both engines use GPU GPU-.*, which NCCL refuses/)
  const back = await filled(t, same.one, { tp: 1 })
  t.match(back.line, /over gloo, because this engine is on the CPU, the other on GPUs/)
  t.same(await back.one.sums(), await host.sums())
})

t.test('an engine on GPUs refuses to send parameters over gloo, with the reason', async t => {
  const peer = await serve(t, 'adder', cards(0, 1))
  t.match(
    await peer.post('/init_weights_send_group_for_remote_instance', {
      master_address: '127.0.0.1',
      ports: '29997',
      group_rank: 0,
      world_size: 2,
      backend: 'gloo'
    }),
    { status: 400, body: { message: /over "gloo" an engine on GPUs sends whole tensors; add "layout": "checkpoint"/ } }
  )
})
