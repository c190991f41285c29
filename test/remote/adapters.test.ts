import { join } from 'node:path'
import t from 'tap'
import { RemoteEngine } from '../../src/remote/remote-engine.ts'
import { openAdapterFolder } from '../../src/sources/disk/adapter-folder.ts'
import { saveAdapter } from '../helpers/fakes/saved-adapter.ts'
import { engineServer, modelFolder } from '../helpers/gateway.ts'

t.test('a remote engine loads, serves and unloads adapters', async t => {
  const folder = modelFolder(t)
  const { url, engine: own } = await engineServer(t, folder, { enableLora: true })
  const remote = await RemoteEngine.connect(url)
  t.teardown(async () => {
    await remote.close()
  })
  const { adapters } = remote
  t.same(adapters!.limits, own.adapters!.limits)
  const path = await saveAdapter(join(folder, 'adder-base'), join(folder, 'policy'), 1)
  const { config, source } = await openAdapterFolder(path, { roots: [folder] })
  t.teardown(async () => {
    await source.close()
  })
  const report = await adapters!.load('p', config, source)
  t.match(report, { name: 'p', version: 1, path, missingCount: 0, isZero: false })
  t.equal(report.digest, own.adapters!.get('p')!.digest)
  t.match(adapters!.list(), [{ name: 'p', version: 1 }])
  await t.rejects(adapters!.load('p', config, source, { existing: 'refuse' }), { code: 'CONFLICT' })
  // Without a path that the engine sees too, the tensors are uploaded: twice, and again to a name that is taken.
  const { path: _, ...tensors } = source
  for (const version of [2, 3]) {
    const uploaded = await adapters!.load('team/q', config, tensors, { pinned: version === 3 })
    t.match(uploaded, { name: 'team/q', version, path: '__upload__', pinned: version === 3, digest: report.digest })
  }
  await t.rejects(adapters!.load('team/q', config, tensors, { existing: 'refuse' }), { code: 'CONFLICT' })
  await t.rejects(adapters!.load('x', { ...(config as object), use_dora: true }, tensors), { code: 'ADAPTER_REFUSED' })
  const streamed = { ...tensors, kind: 'streamed' } as never
  await t.rejects(adapters!.load('x', config, streamed), { code: 'UNSUPPORTED', message: /takes no streamed bytes/ })
  await adapters!.unload('team/q')
  t.match(adapters!.list(), [{ name: 'p', version: 1 }])
  await t.rejects(
    fetch(`${url}/adapter_files/p`).then(async reply => await reply.formData()).then(form => {
      t.same([...form.values()].map(file => (file as File).name), ['adapter_config.json', 'adapter_model.safetensors'])
      throw new Error('read')
    }),
    { message: 'read' }
  )
  t.equal((await fetch(`${url}/adapter_files/none`)).status, 404)
  const versions = []
  const sampling = {
    maxNewTokens: 2,
    minNewTokens: 0,
    temperature: 0,
    topP: 1,
    topK: 0,
    minP: 0,
    frequencyPenalty: 0,
    presencePenalty: 0,
    repetitionPenalty: 1,
    stopTokenIds: [],
    ignoreEos: true,
    logitBias: [],
    seed: null
  }
  const request = { inputIds: Int32Array.of(5, 6), sampling, logprobs: null }
  for await (const event of remote.generate({ ...request, rid: 'a', adapter: 'p' })) versions.push(event.adapterVersion)
  t.same([...new Set(versions)], [1])
  for await (const event of remote.generate({ ...request, rid: 'b' })) t.equal(event.adapterVersion, undefined)
  t.match(await adapters!.unload('p'), { name: 'p', version: 1 })
  t.same(adapters!.list(), [])
  await t.rejects(adapters!.unload('p'), { code: 'ADAPTER_UNKNOWN' })
})

t.test('a remote engine without adapters has none', async t => {
  const { url } = await engineServer(t, modelFolder(t))
  const remote = await RemoteEngine.connect(url)
  t.teardown(async () => {
    await remote.close()
  })
  t.equal(remote.adapters, undefined)
})
