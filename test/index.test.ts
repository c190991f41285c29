import { join } from 'node:path'
import Fastify from 'fastify'
import t from 'tap'
import refit, * as index from '../src/index.ts'
import { packageRoot } from '../src/root.ts'
import { FakeEngine } from './helpers/fake-engine.ts'

t.test('importing the package and serving a custom engine load no native code', async t => {
  t.same(Object.keys(index).sort(), [
    'ClientError',
    'ERROR_CODES',
    'RefitClient',
    'RefitError',
    'RemoteEngine',
    'buildServer',
    'createEngine',
    'createGateway',
    'createServer',
    'default',
    'endProcess',
    'loadTokenizer',
    'refit'
  ])
  const app = Fastify()
  await app.register(refit, { engine: new FakeEngine(), tokenizer: null })
  await app.ready()
  await app.close()
  const { sharedObjects } = process.report.getReport() as unknown as { sharedObjects: string[] }
  t.ok(sharedObjects.length > 0)
  t.same(sharedObjects.filter(path => path.endsWith('refit.node')), [])
})

t.test("the model's own tokenizer is the default, and a model without one has none", async t => {
  const modelPath = join(packageRoot, 'models/adder')
  const status = async (path: string) => {
    const app = Fastify()
    await app.register(refit, { engine: new FakeEngine({ info: { modelPath: path, eosTokenIds: [256] } }) })
    const reply = await app.inject({ method: 'POST', url: '/tokenize', payload: { prompt: '1+2=' } })
    await app.close()
    return reply.statusCode
  }
  t.equal(await status(modelPath), 200)
  t.equal(await status('/nowhere'), 400)
})
