// Requests to the server that this page came from. The key, if there is one, goes into the Authorization header, never
// into an address. It lives as long as the tab.

const STORED = 'refit key'
const RETRY_MS = [500, 1000, 2000, 4000]
/** The server sends a frame at least every second. */
const SILENCE_MS = 15_000

export function storedKey () {
  return sessionStorage.getItem(STORED)
}

export function storeKey (key) {
  if (key === null) sessionStorage.removeItem(STORED)
  else sessionStorage.setItem(STORED, key)
}

/** `path` is relative to the page, which lies at /ui/. */
export async function ask (path, { headers = {}, ...options } = {}) {
  const key = storedKey()
  return await fetch(path, {
    cache: 'no-store',
    credentials: 'omit',
    ...options,
    headers: { ...headers, ...key === null ? {} : { authorization: `Bearer ${key}` } }
  })
}

/** Reads server-sent events from a reply, with their name and parsed data. */
export async function* eventsOf (reply, onBytes = () => {}) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader()
  let text = ''
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) return
      onBytes()
      text += value
      let end
      while ((end = text.indexOf('\n\n')) >= 0) {
        const frame = text.slice(0, end)
        text = text.slice(end + 2)
        const event = /^event: (.*)$/m.exec(frame)?.[1] ?? 'message'
        const data = /^data: (.*)$/m.exec(frame)?.[1]
        if (data !== undefined) yield { event, data: data === '[DONE]' ? null : JSON.parse(data) }
      }
    }
  } finally {
    reader.cancel().catch(() => {})
  }
}

/** The message of a refusal in any of the server's forms. */
export async function refusalOf (reply) {
  const text = await reply.text()
  try {
    const body = JSON.parse(text)
    return body.error?.message ?? body.message ?? body.error ?? text
  } catch {
    return text || `status ${reply.status}`
  }
}

/**
 * Follows the event stream for ever: connects again when it breaks, and when nothing comes. `onKey` is called if the
 * server wants a key, and resolves when there may be a new one.
 */
export async function follow ({ onFrame, onLive, onKey }) {
  for (let tries = 0;; tries++) {
    const control = new AbortController()
    let silence
    const heard = () => {
      clearTimeout(silence)
      silence = setTimeout(() => control.abort(), SILENCE_MS)
    }
    try {
      heard()
      const reply = await ask('events', { signal: control.signal })
      if (reply.status === 401 || reply.status === 403) {
        clearTimeout(silence)
        onLive(false)
        await onKey(reply.status, await refusalOf(reply))
        tries = -1
        continue
      }
      if (!reply.ok) throw new Error(await refusalOf(reply))
      for await (const { event, data } of eventsOf(reply, heard)) {
        tries = 0
        onLive(true)
        onFrame(event, data)
      }
    } catch {
      // The server is away, or being started again.
    }
    clearTimeout(silence)
    onLive(false)
    await new Promise(resolve => setTimeout(resolve, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)] ?? RETRY_MS[0]))
  }
}
