import t from 'tap'
import { ask, engineServer, gatewayTo, modelFolder } from '../helpers/gateway.ts'

t.test("the gateway serves its engines' metrics, each with the engine's address", async t => {
  const folder = modelFolder(t)
  const engines = await Promise.all([1, 2].map(async () => await engineServer(t, folder)))
  const gateway = await gatewayTo(t, engines.map(({ url }) => url))
  for (const [i, { url }] of engines.entries()) {
    for (let n = 0; n <= i; n++) {
      const reply = await fetch(`${url}/generate`, {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify(ask('1+1=', {}, { max_new_tokens: 2, ignore_eos: true }))
      })
      t.equal(reply.status, 200)
    }
  }
  const text = async (path: string): Promise<string> => {
    const { status, body } = await gateway.get(path)
    t.equal(status, 200)
    return body as string
  }
  const metrics = await text('/metrics')
  t.match(metrics, /^refit:gateway_workers\{state="ready"\} 2$/m)
  t.notMatch(metrics, /^refit:generation_tokens_total/m, "refit's own are in /engine_metrics")
  const name = `model_name="${engines[0]!.engine.info.servedModelName}"`
  for (const [i, { url }] of engines.entries()) {
    const labels = `${name},engine="${i}",worker_addr="${url}"`
    t.match(metrics, `vllm:request_success_total{finished_reason="length",${labels}} ${i + 1}\n`)
    const unified = `is_streaming="false",${name},engine_type="unified",worker_addr="${url}"`
    t.match(metrics, `sglang:num_requests_total{${unified}} ${i + 1}\n`)
    t.match(metrics, `vllm:e2e_request_latency_seconds_bucket{le="+Inf",${labels}} ${i + 1}\n`)
  }
  t.equal(metrics.match(/^# TYPE vllm:request_success_total counter$/gm)?.length, 1)
  const all = await text('/engine_metrics')
  t.match(all, `refit:generation_tokens_total{${name},worker_addr="${engines[1]!.url}"} 4\n`)
  t.match(all, /^process_resident_memory_bytes\{/m)

  await engines[0]!.kill()
  await gateway.until(engines[0]!.url, 'down')
  const left = await text('/metrics')
  t.match(left, `vllm:num_requests_running{${name},engine="0",worker_addr="${engines[1]!.url}"} 0\n`)
  t.notMatch(left, `worker_addr="${engines[0]!.url}"`)
})
