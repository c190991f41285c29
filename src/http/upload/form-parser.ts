import multipart from '@fastify/multipart'
import type { FastifyInstance } from 'fastify'
import { FORM } from './upload-types.ts'

/**
 * Forms are parsed by @fastify/multipart, in this scope. A host's is inherited by every scope, and a second one beside it is refused: then
 * that one is used. What takes the body marks it as a form at once, and a hook of the host that reads all forms, which may be added later, would
 * read ours: here nothing says so before `readForm` does.
 */
export async function installFormParser (app: FastifyInstance): Promise<void> {
  if (!app.hasRequestDecorator('isMultipart') || !app.hasRequestDecorator('parts')) {
    await app.register(multipart)
    app.removeContentTypeParser(FORM)
  }
  app.addContentTypeParser(FORM, (_request, _payload, done) => {
    done(null)
  })
}
