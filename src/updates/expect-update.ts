import type { preParsingHookHandler } from 'fastify'
import type { RouteContext } from '../http/context.ts'

/** Of a route that updates weights, `preParsing`: the engine's threads wake up while the body is read. */
export function expectUpdate ({ engine }: Pick<RouteContext, 'engine'>): preParsingHookHandler {
  return (_request, _reply, payload, done) => {
    engine.expectUpdate?.()
    done(null, payload)
  }
}
