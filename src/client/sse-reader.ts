/**
 * Yields the data of server-sent events up to the end mark, and skips comments and other fields. Returns whether the
 * mark came.
 */
export async function* sseData (body: AsyncIterable<Uint8Array>): AsyncGenerator<string, boolean, undefined> {
  const decoder = new TextDecoder()
  let rest = ''
  for await (const chunk of body) {
    rest += decoder.decode(chunk, { stream: true })
    const lines = rest.split('\n')
    rest = lines.pop()!
    for (const line of lines) {
      if (!line.startsWith('data:')) continue
      const data = line.slice(5).trim()
      if (data === '[DONE]') return true
      yield data
    }
  }
  return false
}
