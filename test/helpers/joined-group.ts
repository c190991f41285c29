import type { Test } from 'tap'
import { layOutPieces } from '../../src/process-groups/pieces.ts'
import type { WeightGroup } from '../../src/process-groups/weight-group.ts'
import { WeightGroups } from '../../src/process-groups/weight-groups.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'
import { FakeGroups } from './fake-groups.ts'

export interface Joined {
  fake: FakeGroups
  groups: WeightGroups
  group: WeightGroup
  server: StoreServer
  announce: (sizes: number[], pieceBytes?: number, runBytes?: number) => ReturnType<WeightGroup['announce']>
}

/** Two ranks of a fake engine in a group "g" of three, whose trainer has published its id or address. */
export async function joined (
  t: Test,
  backend: 'nccl' | 'gloo',
  { staged = false }: { staged?: boolean } = {}
): Promise<Joined> {
  const fake = new FakeGroups({ isNccl: backend === 'nccl' })
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const groups = new WeightGroups({ host: fake.host, policy: masterPolicy(), timeoutMs: 60_000, staged })
  t.teardown(async () => {
    await groups.close(100)
    await server.close()
  })
  await groups.init({
    name: 'g',
    backend,
    address: '127.0.0.1',
    port: server.address.port,
    rankOffset: 1,
    worldSize: 3,
    barrier: false
  })
  t.equal(server.workers, 2, 'both ranks are counted')
  const store = await server.connect()
  if (backend === 'gloo') await store.set('g/g//cpu//0/0', 'rank 0')
  else await store.set('g/g//cuda//0', Buffer.alloc(128, 1))
  store.close()
  const group = groups.get('g')
  return {
    fake,
    groups,
    group,
    server,
    announce: (sizes, pieceBytes = 1000, runBytes) =>
      group.announce(
        layOutPieces(sizes, pieceBytes).pieces,
        ({ first, end }) => `tensors ${first} to ${end - 1}`,
        runBytes
      )
  }
}
