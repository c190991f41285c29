import { readdirSync } from 'node:fs'
import { join } from 'node:path'
import Fastify from 'fastify'
import type { RouteOptions } from 'fastify'
import t from 'tap'
import type { Test } from 'tap'
import { eachRoute, REFUSED } from '../src/dialects/refused.ts'
import { guard } from '../src/http/auth.ts'
import { errorHandler } from '../src/http/error-reply.ts'
import refit from '../src/app/plugin.ts'
import { packageRoot } from '../src/root.ts'
import { ByteTokenizer } from './helpers/byte-tokenizer.ts'
import { FakeEngine } from './helpers/fake-engine.ts'
import { call, routeApp } from './helpers/route-app.ts'

/** Every route and who may call it. A new route belongs in this list. */
const LEVELS: Record<string, 'public' | 'normal' | 'admin'> = {
  'GET /': 'normal',
  'GET /health': 'public',
  'GET /health_generate': 'public',
  'GET /ready': 'public',
  'GET /metrics': 'public',
  'GET /ui': 'public',
  'GET /ui/state': 'normal',
  'GET /ui/events': 'normal',
  'GET /updates': 'normal',
  'GET /updates/:id/trace.json': 'normal',
  'GET /ping': 'normal',
  'POST /ping': 'normal',
  'POST /generate': 'normal',
  'GET /samples/:id': 'normal',
  'POST /samples/find': 'normal',
  'POST /truth': 'normal',
  'GET /truth': 'normal',
  'PUT /generate': 'normal',
  'GET /model_info': 'normal',
  'GET /get_model_info': 'normal',
  'GET /server_info': 'normal',
  'GET /get_server_info': 'normal',
  'GET /weight_version': 'normal',
  'GET /get_weight_version': 'normal',
  'GET /capabilities': 'normal',
  'GET /get_load': 'normal',
  'GET /v1/loads': 'normal',
  'GET /v1/models': 'normal',
  'GET /v1/models/*': 'normal',
  'POST /v1/completions': 'normal',
  'POST /v1/chat/completions': 'normal',
  'POST /v1/responses': 'normal',
  'POST /v1/messages': 'normal',
  'POST /v1/messages/count_tokens': 'normal',
  'POST /parse_function_call': 'normal',
  'POST /separate_reasoning': 'normal',
  'GET /load': 'normal',
  'POST /tokenize': 'normal',
  'POST /detokenize': 'normal',
  'POST /v1/tokenize': 'normal',
  'POST /v1/detokenize': 'normal',
  'GET /flush_cache': 'admin',
  'POST /flush_cache': 'admin',
  'POST /pause_generation': 'admin',
  'POST /continue_generation': 'admin',
  'POST /abort_request': 'admin',
  'GET /release_memory_occupation': 'admin',
  'POST /release_memory_occupation': 'admin',
  'GET /resume_memory_occupation': 'admin',
  'POST /resume_memory_occupation': 'admin',
  'GET /get_weights_by_name': 'admin',
  'POST /get_weights_by_name': 'admin',
  'GET /weights_checker': 'admin',
  'POST /weights_checker': 'admin',
  'POST /update_weight_version': 'admin',
  'POST /release_kept_tensors': 'admin',
  'POST /update_weights_from_disk': 'admin',
  'POST /update_weights_from_tensor': 'admin',
  'POST /init_weights_update_group': 'admin',
  'POST /destroy_weights_update_group': 'admin',
  'POST /update_weights_from_distributed': 'admin',
  'POST /init_weight_transfer_engine': 'admin',
  'POST /start_weight_update': 'admin',
  'POST /start_draft_weight_update': 'admin',
  'POST /update_weights': 'admin',
  'POST /finish_weight_update': 'admin',
  'POST /collective_rpc': 'admin',
  'POST /init_weight_update_communicator': 'admin',
  'POST /update_weights_skyrl': 'admin',
  'POST /fetch_weights': 'admin',
  'POST /init_weights_send_group_for_remote_instance': 'admin',
  'POST /send_weights_to_remote_instance': 'admin',
  'GET /remote_instance_weights_info': 'admin',
  'POST /update_weights_from_peer': 'admin',
  'GET /report': 'admin',
  'GET /adapters': 'normal',
  'GET /adapters/*': 'normal',
  'GET /adapter_files/*': 'admin',
  'POST /adapters/*': 'admin',
  'DELETE /adapters/*': 'admin',
  'POST /load_lora_adapter': 'admin',
  'POST /unload_lora_adapter': 'admin',
  'POST /load_lora_adapter_from_tensors': 'admin',
  'POST /load_lora_adapter_from_distributed': 'admin',
  'POST /load_lora_adapter_from_ipc': 'admin',
  'POST /v1/load_lora_adapter': 'admin',
  'POST /v1/unload_lora_adapter': 'admin',
  'POST /skyrl/v1/load_lora_adapter': 'admin',
  'POST /init_broadcaster': 'admin',
  'POST /init_communicator': 'admin',
  'POST /update_named_param': 'admin',
  'POST /close_communicator': 'admin',
  'POST /engine/init_weights_update_group': 'admin',
  'POST /engine/update_weights_from_distributed': 'admin',
  'POST /engine/pause_generation': 'admin',
  'POST /engine/resume_generation': 'admin',
  'POST /nemo-rl/refit/prepare': 'admin',
  'POST /nemo-rl/refit/s3-manifest': 'admin',
  'POST /nemo-rl/refit/zmq-flush': 'admin',
  'POST /nemo-rl/refit/flush': 'admin',
  'POST /areal_init_weights_update_group': 'admin',
  'POST /areal_set_update_weight_meta': 'admin',
  'POST /areal_update_weights_xccl': 'admin',
  'POST /areal_set_update_weight_meta_lora': 'admin',
  'POST /areal_update_weights_lora_xccl': 'admin',
  'POST /areal_update_weights_lora': 'admin',
  'POST /areal_update_weights': 'admin',
  'POST /areal_update_weights_tensor': 'admin',
  'POST /areal_pause_generation': 'admin',
  'POST /areal_continue_generation': 'admin',
  'POST /update_weights_from_ipc': 'admin',
  'POST /pull_weights': 'admin',
  'POST /post_process_weights': 'admin',
  'POST /start_profile': 'admin',
  'GET /remote_instance_transfer_engine_info': 'admin',
  'GET /get_remote_instance_transfer_engine_info': 'admin',
  'GET /parallelism_config': 'normal',
  'POST /stop_profile': 'admin',
  'POST /pause': 'admin',
  'POST /resume': 'admin',
  'GET /is_paused': 'normal',
  'POST /abort_requests': 'admin',
  'POST /reset_prefix_cache': 'admin',
  'POST /reset_mm_cache': 'admin',
  'POST /reset_encoder_cache': 'admin',
  'POST /sleep': 'admin',
  'POST /wake_up': 'admin',
  'GET /is_sleeping': 'normal',
  'GET /get_world_size': 'normal',
  'GET /get_tensor_parallel_size': 'normal',
  'GET /weight_info': 'normal',
  'POST /weight_checker': 'admin',
  'GET /version': 'normal',
  'GET /liveness': 'public',
  'POST /inference/v1/generate': 'normal',
  'POST /skyrl/v1/generate': 'normal',
  'POST /inference/v1/abort_requests': 'admin',
  'POST /release_kv_cache_memory': 'admin',
  'POST /shutdown_weight_transfer_engine': 'admin',
  'POST /finish_session': 'normal',
  'POST /v1/chat/completions/render': 'normal',
  'POST /v1/chat/completions/tokens': 'normal',
  'POST /chat': 'normal',
  'POST /get_sequence_logprobs': 'normal',
  'POST /begin_weight_update': 'admin',
  'POST /end_weight_update': 'admin',
  'POST /shard_plans': 'admin',
  'GET /shard_plans/:id': 'admin',
  'GET /shard_plans/:id/sources/:source': 'admin',
  'DELETE /shard_plans/:id': 'admin',
  'POST /shard_plans/:id/parts/:source': 'admin',
  'POST /update_weights_from_shards': 'admin',
  'POST /weight_transactions': 'admin',
  'GET /weight_transactions': 'admin',
  'GET /weight_transactions/:id': 'admin',
  'POST /weight_transactions/:id/commit': 'admin',
  'POST /weight_transactions/:id/abort': 'admin'
}

t.test('every route declares its intended auth level', async t => {
  const app = Fastify()
  const found: Record<string, unknown> = {}
  app.addHook('onRoute', (route: RouteOptions) => {
    for (const method of [route.method].flat()) {
      if (method !== 'HEAD') found[`${method} ${route.url.replace(/(?<=.)\/$/, '')}`] = route.config?.auth
      // The HEAD route that Fastify adds must not bypass the key.
      else t.ok(route.config?.auth, `HEAD ${route.url}`)
    }
  })
  await app.register(refit, { engine: new FakeEngine(), tokenizer: null, ui: true })
  await app.ready()
  // The files of the page, which hold no data.
  const files = [...readdirSync(join(packageRoot, 'ui')), 'uplot.js', 'uplot.css'].filter(name => name !== 'index.html')
  const page = Object.fromEntries(files.map(name => [`GET /ui/${name}`, 'public']))
  const refused = REFUSED.flatMap(eachRoute).map((
    { method, path }
  ) => [`${method} ${path.replace(/\{(\w+)\}/g, ':$1')}`, 'normal'])
  t.same(found, { ...Object.fromEntries(refused), ...page, ...LEVELS })
  await app.close()
})

t.test('a route without a level cannot be registered', async t => {
  const app = Fastify()
  guard(app, {})
  t.throws(() => app.get('/open', async () => ''), /route GET \/open declares no auth level/)
  t.throws(() => app.get('/odd', { config: { auth: 'everybody' as never } }, async () => ''), /declares no auth level/)
})

const API = 'api-key'
const ADMIN = 'admin-key'
type Statuses = [noKey: number, apiKey: number, adminKey: number]
/** SGLang's table: the replies without a key, with the API key and with the admin key. */
const TABLE: [
  name: string,
  keys: { apiKey?: string, adminApiKey?: string },
  normal: Statuses,
  admin: Statuses,
  adminOnly: Statuses
][] = [
  ['no keys', {}, [200, 200, 200], [200, 200, 200], [403, 403, 403]],
  ['the API key alone', { apiKey: API }, [401, 200, 401], [401, 200, 401], [403, 403, 403]],
  ['the admin key alone', { adminApiKey: ADMIN }, [200, 200, 200], [401, 401, 200], [401, 401, 200]],
  ['both keys', { apiKey: API, adminApiKey: ADMIN }, [401, 200, 401], [401, 401, 200], [401, 401, 200]]
]
const BODIES: Record<number, object> = { 401: { error: 'Unauthorized' }, 403: { error: 'Forbidden' } }

for (const [name, keys, normal, admin, adminOnly] of TABLE) {
  t.test(`with ${name} set, each auth level admits the callers that SGLang admits`, async t => {
    const { url } = await routeApp(t, keys)
    const closed = await adminOnlyRoute(t, keys)
    for (
      const [level, at, expected] of [
        ['normal', `${url}/model_info`, normal],
        ['admin', `${url}/flush_cache`, admin],
        ['admin-only', closed.url, adminOnly],
        ['public', `${url}/health`, [200, 200, 200]],
        ['public', `${url}/metrics`, [200, 200, 200]]
      ] as const
    ) {
      for (const [i, key] of [undefined, API, ADMIN].entries()) {
        const { status, json } = await call(
          at,
          undefined,
          key === undefined ? {} : { headers: { authorization: `Bearer ${key}` } }
        )
        t.equal(status, expected[i], `${level} route with ${key ?? 'no key'}`)
        if (status !== 200) t.same(json, BODIES[status])
      }
    }
    t.equal(
      closed.calls(),
      adminOnly.filter(status => status === 200).length,
      'only admitted callers reach the admin-only route'
    )
  })
}

/** No route of refit is admin-only, so the test makes one. */
async function adminOnlyRoute (
  t: Test,
  keys: { apiKey?: string, adminApiKey?: string }
): Promise<{ url: string, calls: () => number }> {
  const app = Fastify({ forceCloseConnections: true })
  let calls = 0
  app.setErrorHandler(errorHandler)
  guard(app, keys)
  app.get('/closed', { config: { auth: 'admin-only' } }, async () => ({ calls: ++calls }))
  t.teardown(() => app.close())
  return { url: `${await app.listen({ port: 0 })}/closed`, calls: () => calls }
}

t.test('the scheme is case-insensitive, the key is not, and parts of the key are refused', async t => {
  const { url } = await routeApp(t, { apiKey: 'Secret' })
  const status = async (authorization: string) =>
    (await call(`${url}/model_info`, undefined, { headers: { authorization } })).status
  for (const good of ['Bearer Secret', 'bearer Secret', 'BEARER  Secret', 'Bearer Secret ']) {
    t.equal(await status(good), 200, good)
  }
  for (
    const bad of ['Bearer secret', 'Bearer Secre', 'Bearer Secret2', 'Bearer', 'Bearer ', 'Basic Secret', 'Secret', '']
  ) t.equal(await status(bad), 401, bad)
})

t.test("OpenAI routes refuse in OpenAI's shape, and before the body is looked at", async t => {
  const { url } = await routeApp(t, { apiKey: API })
  const { status, json, headers } = await call(`${url}/v1/completions`, { nonsense: 1 })
  t.equal(status, 401)
  t.match(json.error, { type: 'authentication_error', code: 'UNAUTHORIZED', message: /authorization: Bearer/ })
  t.equal(headers.get('www-authenticate'), 'Bearer')
})

t.test('an engine with keys refuses callers without one', async t => {
  const { url, engine } = await routeApp(t, { adminApiKey: ADMIN })
  for (
    const path of [
      '/pause_generation',
      '/continue_generation',
      '/abort_request',
      '/weights_checker',
      '/update_weight_version',
      '/update_weights_from_disk',
      '/get_weights_by_name'
    ]
  ) {
    t.equal(
      (await call(url + path, { abort_all: true, new_version: 'x', model_path: '/', name: 'a.weight' })).status,
      401,
      path
    )
  }
  t.same(engine.calls, [])
  t.equal(engine.weightVersion, 'default')
})

t.test('the tokenizer option does not open routes', async t => {
  const { url } = await routeApp(t, { apiKey: API, tokenizer: new ByteTokenizer() })
  t.equal((await call(`${url}/tokenize`, { prompt: 'a' })).status, 401)
})
