type Headers = Record<string, string | string[] | undefined>

/** A call to an engine, before it is sent. */
export interface EngineCall {
  /** The engine's address. */
  url: string
  method: string
  path: string
  headers: Headers
}

/** Gets every call to an engine; null: it does not watch this one. */
export type CallWatcher = (call: EngineCall) => WatchedCall | null

export interface WatchedCall {
  /** The headers that are sent instead. */
  headers: Headers
  /** The status, after the reply's last byte; or the error that ended the call. */
  ended: (result: number | Error) => void
}
