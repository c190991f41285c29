import type { IncomingMessage } from 'node:http'
import type { FastifyInstance, FastifyRequest } from 'fastify'
import { RefitError } from '../errors.ts'
import { mediaTypeError, requireContentType } from './content-type.ts'
import { sendContinue } from './upload/expect-continue.ts'
import { BodyMemory, releaseBodies } from './upload/body-memory.ts'
import { freeBody, holdBody } from './upload/hold-body.ts'
import { cutLists } from './cut-lists.ts'
import { checkJsonCost, mostPoints } from './json-cost.ts'
import { MAX_BODY_BYTES } from './limits.ts'
import type { CutValues } from './parse-json.ts'
import { parseJsonText } from './parse-json.ts'
import { hasTime, nextTurn } from './turns.ts'
import { BYTES, FORM, uploadType } from './upload/upload-types.ts'

declare module 'fastify' {
  interface FastifyRequest {
    /** Memory of the bodies of all requests. */
    bodyMemory: BodyMemory
    /** The limit of bytes that json-cost.ts takes. */
    maxBodyBytes: number
  }
}

/**
 * refit's own parsers, in its own scope: a host may have parsers for the same types, and Fastify's refuse empty bodies,
 * which trainers send. Other types than JSON, and bodies without a type, are refused before they are read.
 */
export function installBodyParsers (
  app: FastifyInstance,
  memory = new BodyMemory(),
  maxBodyBytes = MAX_BODY_BYTES
): void {
  app.decorateRequest('bodyMemory', { getter: () => memory })
  app.decorateRequest('maxBodyBytes', { getter: () => maxBodyBytes })
  releaseBodies(app)
  app.removeAllContentTypeParsers()
  for (const type of ['application/json', '*']) {
    app.addContentTypeParser(
      type,
      async (request: FastifyRequest, body: IncomingMessage) => await readJson(request, body)
    )
  }
  // Routes with uploads read them from the raw request when they are ready; other routes are sent none. Forms have a
  // parser of their own.
  app.addContentTypeParser(BYTES, (_request, _payload, done) => {
    done(null)
  })
  app.addHook('preParsing', async request => {
    if (uploadType(request) !== undefined) return
    requireContentType(request)
    const { 'content-type': type = '', 'content-length': length } = request.headers
    if (type === '' || length === '0' || request.method === 'GET' || request.method === 'HEAD' || isJson(type)) {
      return sendContinue(request.raw)
    }
    const uploads = request.routeOptions.config.uploads === true ? `, or files as ${FORM} or ${BYTES}` : ''
    const message = `content type ${
      JSON.stringify(type.slice(0, 100))
    } is not taken here; send JSON with "content-type: application/json"${uploads}`
    throw mediaTypeError(message)
  })
  app.addHook('preValidation', async request => {
    if (request.body === undefined && request.routeOptions.schema?.body !== undefined) request.body = {}
  })
}

async function readJson (request: FastifyRequest, body: IncomingMessage): Promise<unknown> {
  const { raw, headers, routeOptions, bodyMemory } = request
  const claim = bodyMemory.claimFor(request)
  const bytes = await holdBody(body, routeOptions.bodyLimit, body === raw ? headers : {}, claim)
  // Several long bodies may have come in this turn of the event loop.
  if (!hasTime()) await nextTurn()
  let parts: { text: string, cut: CutValues | undefined }
  try {
    const { memory, lists } = await checkJsonCost(bytes, mostPoints(routeOptions.config.auth, request.maxBodyBytes))
    // The text, and what it becomes.
    claim.grow(bytes.length + memory)
    parts = await cutLists(bytes, lists)
  } finally {
    freeBody(bytes)
  }
  return parseJson(parts.text, parts.cut)
}

/** Parses JSON text; an empty text is `{}`. A key that would reach a prototype is refused, not dropped. */
function parseJson (text: string, cut: CutValues | undefined): unknown {
  if (text.trim() === '') return {}
  let value: unknown
  try {
    value = parseJsonText(text, cut)
  } catch (error) {
    const hint = /[:[,]\s*(NaN|-?Infinity)\b/.test(text) ? '; NaN and Infinity are no JSON, send null' : ''
    throw new RefitError(
      'INVALID_REQUEST',
      `the body is not valid JSON (${(error as Error).message.slice(0, 200)}${hint})`
    )
  }
  if (text.includes('__proto__') || text.includes('\\u')) refusePrototypeKeys(value)
  return value
}

/** The body of a GET, which Fastify does not read; `{}` without one. */
export async function readJsonBody (request: FastifyRequest): Promise<unknown> {
  const { 'content-length': length = '0', 'transfer-encoding': encoding } = request.headers
  if (encoding === undefined && length === '0') return {}
  return await readJson(request, request.raw)
}

function isJson (type: string): boolean {
  return /^\s*application\/([\w.-]+\+)?json\s*(;|$)/i.test(type)
}

// Iterative: a body may nest deeper than the stack.
function refusePrototypeKeys (root: unknown): void {
  const open = [root]
  while (open.length > 0) {
    const value = open.pop()
    if (typeof value !== 'object' || value === null) continue
    if (Object.hasOwn(value, '__proto__')) {
      throw new RefitError('INVALID_REQUEST', 'the body has a field "__proto__"', { param: '__proto__' })
    }
    const inside: unknown[] = Array.isArray(value) ? value : Object.values(value)
    for (const inner of inside) if (typeof inner === 'object') open.push(inner)
  }
}
