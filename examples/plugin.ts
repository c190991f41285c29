import Fastify from 'fastify'
import refit, { createEngine } from 'refit'

// A rollout engine inside an app of your own: its routes, parsers and error bodies stay under a prefix.
//   node dist/examples/plugin.js models/adder-base

const model = process.argv[2] ?? 'models/adder-base'
const app = Fastify({ logger: true })
const engine = await createEngine(model)

app.get('/', async () => ({ hello: 'this app is mine' }))
await app.register(refit, { engine, prefix: '/rollout' })
app.addHook('onClose', async () => await engine.close())

await app.listen({ host: '127.0.0.1', port: 8080 })
// curl http://127.0.0.1:8080/rollout/generate -H 'content-type: application/json' -d '{"input_ids": [1, 2, 3]}'
