/** Makes one value for each key at its first use; the value is collected with the key. */
export function memoize<K extends object, V extends object> (make: (key: K) => V): (key: K) => V {
  const made = new WeakMap<K, V>()
  return key => {
    let value = made.get(key)
    if (value === undefined) made.set(key, value = make(key))
    return value
  }
}
