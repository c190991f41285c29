import type { DialectCalls } from '../gateway/gateway-call.ts'

/**
 * The facts about a dialect that the server, the command line and the gateway know without loading its routes. The
 * routes are in routes/NAME/. src/app/dialects.ts lists both.
 */
export interface Dialect<Name extends string = string> extends DialectCalls {
  name: Name
  /** The client that uses these routes, for people. */
  title: string
}
