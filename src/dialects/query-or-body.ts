/** Options that clients send in the query, in a JSON body, or in both: the body wins, and null counts as missing. */
export function queryOrBody<T extends object> (query: T, body: T): T {
  return { ...query, ...Object.fromEntries(Object.entries(body).filter(([, value]) => value !== null)) }
}
