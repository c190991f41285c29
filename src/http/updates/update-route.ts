import type { IncomingHttpHeaders } from 'node:http'
import type {
  FastifyBaseLogger,
  FastifyContextConfig,
  FastifyInstance,
  FastifySchema,
  RawReplyDefaultExpression,
  RawRequestDefaultExpression,
  RawServerDefault,
  RouteHandlerMethod,
  RouteShorthandOptions
} from 'fastify'
import type { RouteGenericInterface } from 'fastify/types/route.js'
import type { TypeBoxTypeProvider } from '@fastify/type-provider-typebox'
import type { App, UpdatesContext } from '../context.ts'
import { registerPending } from '../../updates/run-update.ts'
import { sentBy } from '../../updates/sender.ts'

declare module 'fastify' {
  interface FastifyContextConfig {
    /** Whether a request can change weights: `updateRoute` sets true, `weightsRoute` false unless the route sets it. */
    changesWeights?: boolean
    /** Name of the dialect that lists the route; the plugin sets it. */
    dialect?: string
  }
}

/** The scope of a file of routes that take an UpdatesContext: it registers by `updateRoute` and `weightsRoute`. */
export type UpdateApp = Omit<App, 'all' | 'delete' | 'patch' | 'post' | 'put' | 'route'>

/** A file of routes that change weights, or that prepare and end such changes. */
export type UpdateRoutes<Context = UpdatesContext> = (app: UpdateApp, options: { context: Context }) => Promise<void>

interface Options<Schema extends FastifySchema>
  extends Omit<RouteShorthandOptions, 'attachValidation' | 'config' | 'preParsing' | 'schema'> {
  schema: Schema
  /** Added to the admin level and to the error form of weight updates. */
  config?: FastifyContextConfig
  /**
   * Makes the error for an invalid body. It also releases the handles, or receives and drops the broadcasts, that
   * belong to such a request.
   */
  refuse?: (
    body: Readonly<Record<string, unknown>>,
    error: Error,
    headers: IncomingHttpHeaders
  ) => Promise<Error>
}

type Handler<Schema extends FastifySchema> = RouteHandlerMethod<
  RawServerDefault,
  RawRequestDefaultExpression,
  RawReplyDefaultExpression,
  RouteGenericInterface,
  FastifyContextConfig,
  Schema,
  TypeBoxTypeProvider,
  FastifyBaseLogger
>

/**
 * Registers a POST route that writes weights. It requires the admin key, and `handle` sees only valid bodies. After an
 * invalid body nothing has changed, and the transaction that the body names has tensors pending. `handle` writes by
 * `runUpdate` or `runTransaction`, which join retries and close the source.
 */
export function updateRoute<const Schema extends FastifySchema> (
  app: UpdateApp,
  { engine }: Pick<UpdatesContext, 'engine'>,
  url: string,
  { refuse, ...options }: Options<Schema>,
  handle: Handler<Schema>
): void {
  register(app, url, {
    ...options,
    config: { ...options.config, changesWeights: true },
    // The engine's threads wake up while the body is read.
    preParsing: (_request, _reply, payload, done) => {
      engine.expectUpdate?.()
      done(null, payload)
    },
    refuse: async (body, error, headers) => {
      const { transaction } = body
      registerPending(engine, typeof transaction === 'string' ? transaction : null, error)
      return await refuse?.(body, error, headers) ?? error
    }
  }, handle)
}

/**
 * Registers a POST route that loads or unloads an adapter while requests generate. It requires the admin key, and
 * `handle` sees only valid bodies. The body is read when tokens have just been delivered: reading and checking it takes
 * as long as a delivery, and tokens that come meanwhile would wait.
 */
export function adapterRoute<const Schema extends FastifySchema> (
  app: UpdateApp,
  { engine }: Pick<UpdatesContext, 'engine'>,
  url: string,
  { config, ...options }: Options<Schema>,
  handle: Handler<Schema>
): void {
  register(app, url, {
    ...options,
    config: { changesWeights: false, ...config },
    preParsing: async (_request, _reply, payload) => {
      await engine.lull?.()
      return payload
    }
  }, handle)
}

/**
 * Registers a POST route that belongs to updates but writes nothing: groups, scopes, announcements, checks. It requires
 * the admin key, and `handle` sees only valid bodies.
 */
export function weightsRoute<const Schema extends FastifySchema> (
  app: UpdateApp,
  url: string,
  { config, ...options }: Options<Schema>,
  handle: Handler<Schema>
): void {
  register(app, url, { ...options, config: { changesWeights: false, ...config } }, handle)
}

/** The same for a DELETE, which has no body. */
export function deleteRoute<const Schema extends FastifySchema> (
  app: UpdateApp,
  url: string,
  { config, schema }: Pick<Options<Schema>, 'config' | 'schema'>,
  handle: Handler<Schema>
): void {
  ;(app as App).delete(
    url,
    { schema, config: { auth: 'admin', errors: 'weights', changesWeights: false, ...config } },
    handle
  )
}

function register<Schema extends FastifySchema> (
  app: UpdateApp,
  url: string,
  { config, refuse, ...options }: Options<Schema> & Pick<RouteShorthandOptions, 'preParsing'>,
  handle: Handler<Schema>
): void {
  const checked = async function (this: FastifyInstance, ...[request, reply]: Parameters<Handler<Schema>>) {
    const { validationError, headers } = request
    if (validationError !== undefined) {
      const body: unknown = request.body ?? {}
      throw await refuse?.(body as Record<string, unknown>, validationError, headers) ?? validationError
    }
    const { dialect = null } = request.routeOptions.config
    return await sentBy(
      { dialect, route: url, address: request.ip },
      async () => await handle.call(this, request, reply)
    )
  }
  ;(app as App).post(url, {
    ...options,
    attachValidation: true,
    config: { auth: 'admin', errors: 'weights', ...config }
  }, checked as Handler<Schema>)
}
