/** As much as is held of a whole reply. */
const LONGEST = 256 << 20

/**
 * Yields the data of server-sent events up to the end mark, and skips comments and other fields. Returns whether the
 * mark came.
 */
export async function* sseData (
  body: AsyncIterable<Uint8Array>,
  longest = LONGEST
): AsyncGenerator<string, boolean, undefined> {
  const decoder = new TextDecoder()
  let rest: string[] = []
  let length = 0
  for await (const chunk of body) {
    const [first, ...lines] = decoder.decode(chunk, { stream: true }).split('\n') as [string, ...string[]]
    rest.push(first)
    length += first.length
    if (length > longest) throw new Error(`an event of the stream is longer than ${longest} characters`)
    if (lines.length === 0) continue
    const last = lines.pop()!
    lines.unshift(rest.join(''))
    rest = [last]
    length = last.length
    for (const line of lines) {
      if (!line.startsWith('data:')) continue
      const data = line.slice(5).trim()
      if (data === '[DONE]') return true
      yield data
    }
  }
  return false
}
