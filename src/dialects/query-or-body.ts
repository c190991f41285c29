/** Options of a request that clients send as a query or as a JSON body, or both: the body's win, null is none. */
export function queryOrBody<T extends object> (query: T, body: T): T {
  return { ...query, ...Object.fromEntries(Object.entries(body).filter(([, value]) => value !== null)) }
}
