import t from 'tap'
import type { Test } from 'tap'
import { tensorSource } from '../../helpers/adapters.ts'
import { FakeEngine } from '../../helpers/fake-engine.ts'
import { call, frames, routeApp } from '../../helpers/route-app.ts'
import type { Reply } from '../../helpers/route-app.ts'

/** A server with the adapters `a` and `b`, and a function that completes a prompt. */
async function served (t: Test, names: readonly string[] = ['a', 'b']) {
  const engine = new FakeEngine({ adapters: true })
  for (const name of names) await engine.adapters!.load(name, { r: 1 }, tensorSource([]))
  const { url } = await routeApp(t, { engine })
  const complete = async (fields: object): Promise<Reply> =>
    await call(url + '/v1/completions', { prompt: [5], max_tokens: 1, ...fields })
  return { engine, url, complete, used: () => engine.requests.at(-1)!.adapter }
}

t.test('model names an adapter as in vLLM, or the base and an adapter as in SGLang', async t => {
  const { complete, used } = await served(t)
  for (
    const [fields, adapter] of [
      [{ model: 'a' }, 'a'],
      [{ model: 'fake:b' }, 'b'],
      [{ model: 'other:b' }, 'b'],
      [{ model: 'fake' }, undefined],
      [{}, undefined],
      [{ model: null }, undefined],
      [{ model: 'default' }, undefined],
      [{ model: '/models/fake' }, undefined],
      [{ lora_path: 'a' }, 'a'],
      [{ lora_path: ['a'] }, 'a'],
      [{ lora_path: [null] }, undefined],
      [{ model: 'fake:b', lora_path: 'a' }, 'b'],
      [{ model: 'a', lora_path: 'b' }, 'a']
    ] as const
  ) {
    const { status, json } = await complete(fields)
    t.equal(status, 200, JSON.stringify(fields))
    t.equal(used(), adapter, JSON.stringify(fields))
    t.equal(json.model, adapter ?? 'fake')
  }
})

t.test('a model that is neither the base nor a loaded adapter is refused, never served by the base', async t => {
  const { complete, engine, url } = await served(t)
  t.match(await complete({ model: 'policy-v7' }), {
    status: 404,
    json: { error: { code: 'NOT_FOUND', message: /no model "policy-v7"; the base model is "fake"\. .*"a", "b"/ } }
  })
  t.match(await complete({ model: 'fake:c' }), {
    status: 400,
    json: { error: { param: 'model', message: /never been loaded, or is unloaded: "c"/ } }
  })
  t.equal((await complete({ model: 'other:c' })).status, 404)
  t.equal((await complete({ lora_path: 'c' })).status, 400)
  t.match(await complete({ prompt: [[5], [6]], lora_path: ['a', 'b'] }), {
    status: 400,
    json: { error: { code: 'UNSUPPORTED' } }
  })
  for (
    const [path, body] of [
      ['/v1/chat/completions', { messages: [{ role: 'user', content: 'x' }] }],
      ['/v1/responses', { input: 'x' }],
      ['/inference/v1/generate', { token_ids: [5] }],
      ['/v1/messages', { max_tokens: 1, messages: [{ role: 'user', content: 'x' }] }]
    ] as const
  ) t.equal((await call(url + path, { ...body, model: 'policy-v7' })).status, 404, path)
  t.equal(engine.requests.length, 0)
})

t.test('an adapter under the name of the base is what that name means', async t => {
  const { complete, used } = await served(t, ['fake'])
  await complete({ model: 'fake' })
  t.equal(used(), 'fake')
  await complete({})
  t.equal(used(), 'fake')
})

t.test('chat, token and stream replies name the adapter', async t => {
  const { url, used } = await served(t)
  const chat = { model: 'a', max_tokens: 1, messages: [{ role: 'user', content: 'x' }] }
  t.equal((await call(url + '/v1/chat/completions', chat)).json.model, 'a')
  t.equal(used(), 'a')
  const streamed = await call(url + '/v1/chat/completions', { ...chat, stream: true })
  t.equal(frames(streamed.text)[0].model, 'a')
  const tokens = await call(url + '/inference/v1/generate', {
    model: 'b',
    token_ids: [5],
    sampling_params: { max_tokens: 1 }
  })
  t.match(tokens.json, { model: 'b', lora: { name: 'b', version: 2 } })
  t.equal((await call(url + '/v1/responses', { model: 'a', input: 'x', max_output_tokens: 1 })).json.model, 'a')
  t.equal((await call(url + '/v1/messages', chat)).json.model, 'a')
  t.equal((await call(url + '/v1/chat/completions/render', chat)).json.model, 'a')
  const info = await call(url + '/v1/chat/completions', { ...chat, return_meta_info: true })
  t.match(info.json.choices[0].meta_info.lora, { name: 'a', version: 1 })
})

t.test('metrics name at most as many adapters as may be loaded', async t => {
  const { url, complete } = await served(t)
  await complete({ model: 'a' })
  const { text } = await call(url + '/metrics')
  for (
    const line of [
      /refit:adapter_version\{[^}]*adapter="a"[^}]*\} 1/,
      /refit:adapter_version\{[^}]*adapter="b"[^}]*\} 2/,
      /refit:adapters_loaded\{[^}]*\} 2/,
      /refit:adapter_slots\{[^}]*\} 4/,
      /sglang:lora_pool_slots_used\{[^}]*\} 2/,
      /sglang:lora_pool_slots_total\{[^}]*\} 4/,
      /sglang:lora_pool_utilization\{[^}]*\} 0\.5/,
      /vllm:lora_requests_info\{[^}]*max_lora="4"[^}]*\} \d/
    ]
  ) t.match(text, line)
  t.same((await call(url + '/v1/loads')).json.loads[0].lora, { slots_used: 2, slots_total: 4, utilization: 0.5 })
  const plain = await routeApp(t)
  t.notMatch((await call(plain.url + '/metrics')).text, /adapter_|lora_pool_slots_used\{|lora_requests_info\{/)
})
