import type { preParsingHookHandler } from 'fastify'
import type { WeightsContext } from '../context.ts'

/** `preParsing` hook of routes that update weights: the engine's threads wake up while the body is read. */
export function expectUpdate ({ engine }: Pick<WeightsContext, 'engine'>): preParsingHookHandler {
  return (_request, _reply, payload, done) => {
    engine.expectUpdate?.()
    done(null, payload)
  }
}
