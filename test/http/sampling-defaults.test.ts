import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import t from 'tap'
import type { Test } from 'tap'
import { loadConfig } from '../../src/config/load-config.ts'
import { readSamplingDefaults } from '../../src/http/generation/sampling-defaults.ts'
import { FakeEngine } from '../helpers/fake-engine.ts'
import { call, routeApp } from '../helpers/route-app.ts'

function folderWith (t: Test, config: string): string {
  const folder = mkdtempSync(join(tmpdir(), 'refit-defaults-'))
  t.teardown(() => {
    rmSync(folder, { recursive: true })
  })
  writeFileSync(join(folder, 'generation_config.json'), config)
  return folder
}

const MODEL = JSON.stringify({
  eos_token_id: 2,
  do_sample: true,
  temperature: 0.5,
  top_p: 0.75,
  top_k: 20,
  min_p: 0.125,
  repetition_penalty: 1.25,
  max_new_tokens: 3
})

const ROUTES = {
  '/v1/completions': { prompt: [5], max_tokens: 1 },
  '/v1/chat/completions': { messages: [{ role: 'user', content: 'a' }], max_tokens: 1 }
}

const sampled = ({ requests }: FakeEngine): object => {
  const { temperature, topP, topK, minP, repetitionPenalty } = requests.at(-1)!.sampling
  return { temperature, topP, topK, minP, repetitionPenalty }
}
const OF_MODEL = { temperature: 0.5, topP: 0.75, topK: 20, minP: 0.125, repetitionPenalty: 1.25 }
const NEUTRAL = { temperature: 1, topP: 1, topK: 0, minP: 0, repetitionPenalty: 1 }

t.test("OpenAI's routes take what a request leaves out from generation_config.json", async t => {
  const engine = new FakeEngine({ info: { modelPath: folderWith(t, MODEL) } })
  const { url } = await routeApp(t, { engine })
  for (const [path, body] of Object.entries(ROUTES)) {
    t.equal((await call(url + path, body)).status, 200)
    t.same(sampled(engine), OF_MODEL, path)
    t.equal((await call(url + path, { ...body, temperature: 0, top_k: 0, repetition_penalty: null })).status, 200)
    t.same(sampled(engine), { ...OF_MODEL, temperature: 0, topK: 0 }, 'values of the request have precedence')
  }
  await call(`${url}/generate`, { input_ids: [5], sampling_params: { max_new_tokens: 1 } })
  t.same(sampled(engine), NEUTRAL, "as on SGLang's and vLLM's own routes")
  await call(`${url}/inference/v1/generate`, { token_ids: [5], sampling_params: { max_tokens: 1 } })
  t.same(sampled(engine), NEUTRAL)
  t.same((await call(`${url}/server_info`)).json.sampling_defaults, {
    temperature: 0.5,
    top_p: 0.75,
    top_k: 20,
    min_p: 0.125,
    repetition_penalty: 1.25
  })
})

t.test("--sampling-defaults openai, or vLLM's --generation-config vllm, leaves the file out", async t => {
  const engine = new FakeEngine({ info: { modelPath: folderWith(t, MODEL) } })
  const { url } = await routeApp(t, { engine, samplingDefaults: 'openai' })
  for (const [path, body] of Object.entries(ROUTES)) {
    t.equal((await call(url + path, body)).status, 200)
    t.same(sampled(engine), NEUTRAL, path)
  }
  t.same((await call(`${url}/server_info`)).json.sampling_defaults, {})
  const chosen = (...args: string[]): string => loadConfig(args, {}).config.samplingDefaults
  t.same(
    [chosen(), chosen('--generation-config', 'vllm'), chosen('--generation-config', 'auto')],
    ['model', 'openai', 'model']
  )
})

t.test('a wrong value is refused at the start, and a missing file or value is none', async t => {
  t.same(await readSamplingDefaults('/nowhere'), {})
  t.same(await readSamplingDefaults(folderWith(t, '{"top_p":null,"top_k":0}')), { top_k: 0 })
  await t.rejects(readSamplingDefaults(folderWith(t, '{"temperature":"hot"}')), {
    code: 'MODEL_CONFIG',
    message: /temperature: expected a number, got "hot"/
  })
  await t.rejects(readSamplingDefaults(folderWith(t, '{')), { code: 'MODEL_CONFIG', message: /is no JSON/ })
})
