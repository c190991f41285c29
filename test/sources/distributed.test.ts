import t from 'tap'
import { FakeGroups } from '../helpers/fake-groups.ts'
import { joined } from '../helpers/joined-group.ts'
import { eventually } from '../helpers/eventually.ts'
import { WeightGroups } from '../../src/process-groups/weight-groups.ts'
import { DistributedReceiver } from '../../src/sources/distributed/distributed.ts'
import { masterPolicy } from '../../src/rendezvous/master-policy.ts'
import { StoreServer } from '../../src/rendezvous/server.ts'

const BUCKET = 1 << 20

t.test('a pickle that is refused for its size takes little more memory than one that is accepted', async t => {
  const fake = new FakeGroups({ isNccl: false })
  const server = await StoreServer.listen({ host: '127.0.0.1', port: 0 })
  const groups = new WeightGroups({ host: fake.host, policy: masterPolicy(), timeoutMs: 60_000 })
  t.teardown(async () => {
    await groups.close(100)
    await server.close()
  })
  const receiver = new DistributedReceiver(groups, BUCKET)
  const store = await server.connect()
  t.teardown(() => {
    store.close()
  })
  let round = 0
  const joined = async (): Promise<string> => {
    const name = `g${round++}`
    await store.set(`${name}/${name}//cpu//0/0`, 'rank 0')
    await groups.init({
      name,
      backend: 'gloo',
      address: '127.0.0.1',
      port: server.address.port,
      rankOffset: 1,
      worldSize: 3
    })
    await eventually(async () => {
      await new Promise(setImmediate)
    }, () => groups.get(name).state === 'connected')
    return name
  }
  const announced = (groupName: string, bytes: number, loadFormat: string | null = null) => ({
    names: ['small', 'large'],
    dtypes: ['uint8', 'uint8'],
    shapes: [[10], [bytes]],
    groupName,
    loadFormat
  })
  fake.send(100)
  const name = await joined()
  await t.rejects(receiver.open(announced(name, 2 * BUCKET)), {
    code: 'TENSOR_PAYLOAD',
    param: 'large',
    message: /received and dropped, and the group stays in step/
  })
  t.match(groups.get(name).state, 'connected')
  for (const [bytes, format] of [[2 * BUCKET + 1, null], [2 ** 50, null], [2 ** 50, 'flattened_bucket']] as const) {
    const name = await joined()
    await t.rejects(receiver.open(announced(name, bytes, format)), {
      code: 'TENSOR_PAYLOAD',
      message:
        /bytes, and one broadcast may have 1048576 \(--bucket-bytes\)\. There is no room to receive and drop it, so that process group "g\d" was aborted; initialise it again$/
    })
    t.throws(() => groups.get(name), { code: 'GROUP_BROKEN' })
  }
  const { names, dtypes, shapes, groupName } = announced(await joined(), 2 ** 50)
  t.match(
    await receiver.refuse({ names, dtypes, shapes, group_name: groupName }, ''),
    /was aborted; initialise it again/
  )
  t.ok(fake.staged.every(([bytes]) => bytes <= 2 * BUCKET), JSON.stringify(fake.staged))
})

t.test('tensors for host memory come beside steps on an engine with two sets, and else with the gate shut', async t => {
  for (const isBeside of [true, false]) {
    const { fake, groups } = await joined(t, 'nccl')
    fake.besideSteps = isBeside
    const receiver = new DistributedReceiver(groups, BUCKET, isBeside)
    for (let part = 0; part < 2; part++) {
      fake.send(2)
      const { source, isCurrent } = await receiver.receive({
        names: ['a', 'b'],
        dtypes: ['float32', 'float32'],
        shapes: [[3], [2, 2]],
        groupName: 'g',
        loadFormat: null
      })
      t.equal(source.tensors.length, 2)
      t.ok(isCurrent())
    }
    t.equal(fake.received.length, 2, 'the tensors of a part are one piece')
    t.ok(fake.received.every(({ gate }) => gate !== isBeside))
    t.equal(fake.shuts, isBeside ? 1 : 2, 'once to connect and to allocate, or for each part')
  }
})
