import { randomBytes } from 'node:crypto'
import { rmSync, writeFileSync } from 'node:fs'
import t from 'tap'
import { engineServer, modelFolder } from '../helpers/gateway.ts'
import { assemble, global, PROTO4, str } from '../helpers/pickles.ts'
import { pickle, sender } from '../helpers/zmq-sender.ts'

const NORM = 'model.norm.weight'

/** A pickled ValueError('its trainer has gone'). */
const stop = assemble(PROTO4, global('builtins', 'ValueError'), '(', str('its trainer has gone'), 't', 'R', '.')

for (const inScope of [true, false]) {
  t.test(`an update that is aborted after a write reports it (${inScope ? 'in a scope' : 'alone'})`, async t => {
    const { url, engine } = await engineServer(t, modelFolder(t), {})
    const post = async (path: string, body: object): Promise<{ status: number, body: any }> => {
      const reply = await fetch(url + path, {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify(body)
      })
      return { status: reply.status, body: await reply.json() }
    }
    const name = `verl_weights_${randomBytes(16).toString('hex')}`
    writeFileSync(`/dev/shm/${name}`, Buffer.alloc(1 << 20))
    t.teardown(() => {
      rmSync(`/dev/shm/${name}`)
    })
    const before = (await engine.checksums()).tensors
    if (inScope) t.match(await post('/begin_weight_update', {}), { status: 200 })
    const dtype = global('torch', 'float32')
    const all = inScope ? [NORM] : before.map(({ name }) => name)
    const table = (engine as any).held.store.table
    const whole = pickle({
      bucket_meta: Object.fromEntries(all
        .map(name => [name, { name, dtype, shape: [...table.tensors.get(name).shape], offset: 0, handle: null }])),
      is_last: false
    })
    const { endpoint } = await sender(t, [pickle({ name, size: 1 << 20 }), whole, stop])
    const reply = await post('/update_weights_from_ipc', { zmq_handles: { 0: endpoint } })
    const after = (await engine.checksums()).tensors
    t.notSame(after, before)
    t.match(reply, {
      status: 409,
      body: { message: /gave the update up: ValueError: its trainer has gone\. Earlier buckets have been written/ }
    })
  })
}
