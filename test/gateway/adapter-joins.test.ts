import { readFile } from 'node:fs/promises'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { arealTrainer } from '../helpers/fakes/areal-trainer.ts'
import { saveAdapter } from '../helpers/fakes/saved-adapter.ts'
import { engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'
import type { EngineServer } from '../helpers/gateway.ts'

// An adapter is replaced or unloaded while an engine that joins is being filled with it.

const FILES = ['adapter_config.json', 'adapter_model.safetensors']

async function fleet (t: Test) {
  const folder = modelFolder(t)
  const model = join(folder, 'adder-base')
  const first = await engineServer(t, folder, { enableLora: true })
  const gateway = await gatewayTo(t, [first.url])
  const upload = async (name: string, variant: number): Promise<void> => {
    const path = await saveAdapter(model, join(folder, `${name}-${variant}`), variant)
    const body = new FormData()
    for (const file of FILES) body.append('file', new Blob([await readFile(join(path, file))]), file)
    const reply = await fetch(`${gateway.url}/adapters/${name}`, { method: 'POST', body })
    t.equal(reply.status, 200, await reply.clone().text())
  }
  /** An engine joins; its load of an adapter waits for `go`. */
  const joins = async (held: string) => {
    const late = await engineServer(t, folder, { enableLora: true })
    const store = late.engine.adapters!
    const load = store.load.bind(store)
    let go = (): void => {}
    const released = new Promise<void>(resolve => {
      go = resolve
    })
    const begun = new Promise<void>(resolve => {
      store.load = async (name, ...rest) => {
        if (name === held) {
          resolve()
          await released
        }
        return await load(name, ...rest)
      }
    })
    t.equal((await gateway.post('/workers', { url: late.url })).status, 202)
    await begun
    return { late, go }
  }
  return { model, first, gateway, upload, joins }
}

const held = ({ engine }: EngineServer): string[][] =>
  engine.adapters!.list().map(({ name, digest }) => [name, digest]).sort()

t.test('an engine that joins has no adapter that was unloaded while it was filled', async t => {
  const { first, gateway, upload, joins } = await fleet(t)
  for (const round of [1, 2]) {
    await upload('stays', 10 + round)
    await upload('goes', round)
    const { late, go } = await joins('goes')
    t.equal((await fetch(`${gateway.url}/adapters/goes`, { method: 'DELETE' })).status, 200)
    go()
    await gateway.until(late.url, 'ready')
    t.match(held(first), [['stays', String]])
    t.same(held(late), held(first), `round ${round}`)
  }
})

t.test('an engine that joins ends with the version that came while it was filled with the one before', async t => {
  const { first, gateway, upload, joins } = await fleet(t)
  for (const round of [1, 2]) {
    await upload('policy', round)
    const before = held(first)
    const { late, go } = await joins('policy')
    await upload('policy', 10 + round)
    go()
    await gateway.until(late.url, 'ready')
    t.not(held(first)[0]![1], before[0]![1])
    t.same(held(late), held(first), `round ${round}`)
  }
})

t.test("an engine that joins is not left with the version that AReaL's next broadcast replaced", async t => {
  const { model, first, gateway, joins } = await fleet(t)
  const send = await arealTrainer(t, gateway, model, 2)
  await send(1)
  for (const version of [2, 3]) {
    const { late, go } = await joins(`p-v${version - 1}`)
    await send(version)
    go()
    await gateway.until(late.url, 'ready')
    t.match(held(first), [[`p-v${version}`, String]])
    t.same(held(late), held(first), `version ${version}`)
    await late.kill()
    await gateway.until(late.url, 'down')
  }
})
