import multipart from '@fastify/multipart'
import type { FastifyInstance } from 'fastify'
import type { Routes } from '../context.ts'
import type { UpdateRoutes } from '../updates/update-route.ts'
import { FORM } from './upload-types.ts'

/** Routes whose bodies may be forms, in a scope of their own: on other routes forms are refused. */
export function takesForms (routes: UpdateRoutes): Routes {
  return async (app, options) => {
    await app.register(async scope => {
      await installFormParser(scope)
      await routes(scope, options)
    })
  }
}

type FormApp = Pick<
  FastifyInstance,
  'addContentTypeParser' | 'hasRequestDecorator' | 'register' | 'removeContentTypeParser'
>

/**
 * @fastify/multipart parses forms, in this scope. If the host has registered it, every scope inherits it and a second
 * registration is refused, so the host's is used. Its content type parser marks a request as a form at once, and a hook
 * of the host that reads all forms, even one added later, would read ours. Here a request is marked only by `readForm`.
 */
export async function installFormParser (app: FormApp): Promise<void> {
  if (!app.hasRequestDecorator('isMultipart') || !app.hasRequestDecorator('parts')) {
    await app.register(multipart)
    app.removeContentTypeParser(FORM)
  }
  app.addContentTypeParser(FORM, (_request, _payload, done) => {
    done(null)
  })
}
