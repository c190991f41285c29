import { Type } from 'typebox'
import type { FastifyInstance } from 'fastify'
import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import type { GenerationContext } from '../../src/http/context.ts'
import { refusals } from '../../src/http/schemas.ts'
import { EngineSource } from '../../src/ui/engine-source.ts'
import type { PageOptions } from '../../src/ui/engine-source.ts'
import { Feed } from '../../src/ui/feed.ts'
import { History } from '../../src/ui/history.ts'
import { servePage } from '../../src/ui/page.ts'
import { serveEvents } from './events.ts'

const Query = Type.Object({
  after: Type.Optional(Type.Integer({ minimum: 0, description: 'Only updates after this revision (default all).' }))
})

const Snapshot = Type.Object({
  kind: Type.Literal('engine'),
  server: Type.Unknown({ description: 'What does not change: model, device, version.' }),
  latency_edges: Type.Array(Type.Number(), {
    description: 'Upper edges of the buckets of `latency`, in milliseconds.'
  }),
  state: Type.Unknown({ description: 'State, label, versions of running requests, loads, groups, adapters.' }),
  updates: Type.Array(Type.Unknown(), { description: 'As in /updates.' }),
  revision: Type.Integer({ description: 'For `after` of the next call.' })
}, { title: 'PageSnapshot', description: 'One reading; fields may change between versions.' })

/** The page of an engine, and the numbers that it shows. */
const ui: FastifyPluginAsyncTypebox<{ context: GenerationContext, page: PageOptions }> = async (
  app,
  { context, page }
) => {
  const { engine } = context
  const history = new History(() => {
    const { tokensPerSecond, running, queued, usedTokens, totalTokens } = engine.stats
    return { tokensPerSecond, running, queued, kv: totalTokens === 0 ? 0 : usedTokens / totalTokens }
  })
  const source = new EngineSource(context, history, page)
  const feed = new Feed(source)
  servePage(app as unknown as FastifyInstance)
  serveEvents(app as unknown as FastifyInstance, feed, ['info'])
  app.addHook('onClose', async () => {
    history.close()
  })

  app.get('/ui/state', {
    config: { auth: 'normal' },
    schema: {
      operationId: 'uiState',
      summary: 'What the page shows now',
      tags: ['info'],
      querystring: Query,
      response: { 200: Snapshot, ...refusals() }
    }
  }, async ({ query: { after = 0 } }) => source.snapshot(after) as Type.Static<typeof Snapshot>)
}

export default ui
