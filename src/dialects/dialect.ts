import type { DialectCalls } from '../gateway/gateway-call.ts'

/**
 * What the server, the command line and the gateway know of a dialect without loading its routes, which are in
 * routes/NAME/. src/app/dialects.ts lists both.
 */
export interface Dialect<Name extends string = string> extends DialectCalls {
  name: Name
  /** The client that uses these routes, for people. */
  title: string
}
