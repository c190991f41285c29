import t from 'tap'
import type { Test } from 'tap'
import { RemoteEngine } from '../../src/remote/remote-engine.ts'
import { EventReader } from '../../src/remote/wire.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { rollout, rolloutRequest } from '../helpers/rollout.ts'
import { call, routeApp } from '../helpers/route-app.ts'

const EXPERTS = { layers: 3, sparse: [0, 2], experts: 8, perToken: 2 }

async function remoteOf (t: Test, engine: FakeEngine): Promise<RemoteEngine> {
  const { url } = await routeApp(t, { engine })
  const remote = await RemoteEngine.connect(url, { pollMs: 1000 })
  t.teardown(async () => {
    await remote.close()
  })
  return remote
}

t.test('a remote refit engine returns the same routed experts as the engine itself', async t => {
  const engine = new FakeEngine({ info: { architecture: 'Qwen3MoeForCausalLM', experts: EXPERTS } })
  const remote = await remoteOf(t, engine)
  t.same(remote.info.experts, EXPERTS)
  for (const expertsFrom of [0, 3]) {
    const request = { ...rolloutRequest([5, 6, 7, 8], { maxNewTokens: 3 }), expertsFrom }
    const own = await rollout(engine, request)
    const far = await rollout(remote, request)
    t.ok(own.last.experts!.length > 0)
    t.same(far.last.experts, own.last.experts)
    t.equal(engine.requests.at(-1)!.expertsFrom, expertsFrom)
  }
  const { url } = await routeApp(t, { engine: remote as never })
  const [near, behind] = await Promise.all(
    [(await routeApp(t, { engine: new FakeEngine({ info: { ...engine.info } }) })).url, url].map(async url =>
      await call(`${url}/generate`, {
        input_ids: [5, 6, 7],
        return_routed_experts: true,
        sampling_params: { max_new_tokens: 4 }
      })
    )
  )
  t.type(near!.json.meta_info.routed_experts, 'string')
  t.equal(behind!.json.meta_info.routed_experts, near!.json.meta_info.routed_experts)
})

t.test('an engine that records no experts gets no request for them, and invalid experts are an error', async t => {
  const engine = new FakeEngine()
  const remote = await remoteOf(t, engine)
  t.equal(remote.info.experts, undefined)
  await t.rejects(rollout(remote, { ...rolloutRequest([5]), expertsFrom: 0 }), {
    code: 'UNSUPPORTED',
    message: /the remote engine does not report that it records/
  })
  t.equal(engine.requests.length, 0)
  const event = (experts: Buffer): string =>
    JSON.stringify({
      output_ids: [5, 6],
      meta_info: { finish_reason: { type: 'length', length: 2 }, routed_experts: experts.toString('base64') }
    })
  for (const bytes of [0, 47, 24 * 2, 24 * 4]) {
    t.throws(
      () => [...new EventReader({ ...rolloutRequest([5, 6]), logprobs: null, expertsFrom: 0 }, false, 'v', EXPERTS)
        .read(event(Buffer
          .alloc(bytes)))],
      { code: 'ENGINE_FAILED', message: /routed_experts, which are not 3 tokens of 3 layers and 2 experts/ },
      `${bytes} bytes`
    )
  }
  const [good] = new EventReader({ ...rolloutRequest([5, 6]), logprobs: null, expertsFrom: 0 }, false, 'v', EXPERTS)
    .read(event(Buffer.alloc(24 * 3)))
  t.equal(good!.experts!.length, 3 * 4)
})
