import type { DialectCalls, GatewayCall, GatewayCalls } from './gateway-call.ts'

export interface CallTable {
  calls: GatewayCalls
  /** Paths that are refused, with what to do instead. */
  refused: Readonly<Record<string, string>>
  /** Dialects that work only while the gateway has one engine. */
  oneEngineDialects: ReadonlySet<string>
}

/**
 * The calls of all dialects in one table. Throws if two dialects list the same path: which one counts would depend on
 * their order.
 */
export function callTable (dialects: readonly DialectCalls[]): CallTable {
  const calls: Record<string, GatewayCall> = {}
  const refused: Record<string, string> = {}
  for (const { name, calls: own, refusedByGateway = {} } of dialects) {
    const twice = [...Object.keys(own), ...Object.keys(refusedByGateway)].find(path => path in calls || path in refused)
    if (twice !== undefined) throw new Error(`dialect ${name}: another dialect lists ${twice} too`)
    Object.assign(calls, own)
    Object.assign(refused, refusedByGateway)
  }
  const oneEngine = dialects.filter(({ calls }) => Object.values(calls).some(call => call.oneEngineOnly !== undefined))
  return { calls, refused, oneEngineDialects: new Set(oneEngine.map(({ name }) => name)) }
}
