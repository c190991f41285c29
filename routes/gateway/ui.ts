import type { FastifyInstance } from 'fastify'
import type { FastifyPluginAsyncTypebox } from '@fastify/type-provider-typebox'
import type { GatewayContext } from '../../src/gateway/gateway.ts'
import { Feed } from '../../src/ui/feed.ts'
import { FleetSource } from '../../src/ui/fleet-source.ts'
import { servePage } from '../../src/ui/page.ts'
import { serveEvents } from '../ui/events.ts'

/** Every tick reads all engines. */
const TICK_MS = 1000

/** The page of a gateway. */
const ui: FastifyPluginAsyncTypebox<{ context: GatewayContext }> = async (app, { context: { fleet } }) => {
  const source = new FleetSource(fleet)
  servePage(app as unknown as FastifyInstance)
  serveEvents(app as unknown as FastifyInstance, new Feed(source, { tickMs: TICK_MS }), ['workers'])
  app.addHook('onClose', async () => {
    source.close()
  })
}

export default ui
