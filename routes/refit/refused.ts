import { eachRoute, REFUSED } from '../../src/dialects/refused.ts'
import { RefitError } from '../../src/errors.ts'
import type { Routes, ServerContext } from '../../src/http/context.ts'
import { refusals } from '../../src/http/schemas.ts'

/** Routes of vLLM and SGLang that refit does not serve: each says why, and what to use instead. */
const refused: Routes<ServerContext> = async app => {
  for (const entry of REFUSED) {
    for (const { method, path } of eachRoute(entry)) {
      const refuse = async (): Promise<never> => {
        throw new RefitError('UNSUPPORTED', `${path} is not served: ${entry.reason}`)
      }
      app.route({
        method,
        url: path.replace(/\{(\w+)\}/g, ':$1'),
        exposeHeadRoute: false,
        config: { auth: 'normal' },
        schema: { hide: true, response: refusals() },
        // The body may have any type, and is not read.
        onRequest: refuse,
        handler: refuse
      })
    }
  }
}

export default refused
