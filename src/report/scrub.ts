// The last check before a report is written. Its parts are chosen so that no secret is among them; this catches what a
// server of another kind, or a later version, adds.

/** Fields whose values are secrets or texts of users, whatever server sends them. */
const SECRET =
  /(^|[_-])(api[_-]?keys?|key|secret|password|passwd|authorization|cookie|credentials?|access[_-]?token|auth[_-]?token|hf[_-]?token|bearer)$/i
const TEXT = /^(prompts?|messages|text|texts|input|inputs|input_ids|output_ids|prompt_token_ids|content|completion)$/i

/** The value with *** for all secrets: by the names of fields, in URLs, and wherever a known one occurs. */
export function scrub (value: unknown, secrets: readonly string[]): unknown {
  if (typeof value === 'string') return scrubText(value, secrets)
  if (Array.isArray(value)) return value.map(item => scrub(item, secrets))
  if (typeof value !== 'object' || value === null) return value
  return Object.fromEntries(
    Object.entries(value).map(([name, item]) => {
      const isHidden = item !== null && item !== '' && (SECRET.test(name) || TEXT.test(name))
      return [scrubText(name, secrets), isHidden ? '***' : scrub(item, secrets)]
    })
  )
}

function scrubText (text: string, secrets: readonly string[]): string {
  let clean = text
  for (const secret of secrets) if (secret !== '') clean = clean.replaceAll(secret, '***')
  return clean
    .replace(/([a-z][a-z0-9+.-]*:\/\/)[^\s/"'@]*@/gi, '$1***@')
    .replace(/([a-z][a-z0-9+.-]*:\/\/[^\s"'?]*)\?[^\s"']*/gi, '$1?***')
    .replace(/\b(bearer|basic)\s+[\w.~+/=-]{8,}/gi, '$1 ***')
    .replace(/\b(sk|hf|ghp|xoxb)[-_][\w-]{12,}/g, '***')
}
