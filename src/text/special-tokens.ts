const NAMES = ['bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token']

/**
 * Special tokens that tokenizer_config.json names, by name; additional ones get a name with a number. Older files hold
 * an object with `content` instead of a string.
 */
export function namedTokens (config: Record<string, unknown>): Map<string, string> {
  const tokens = new Map<string, string>()
  for (const name of NAMES) {
    const token = content(config[name])
    if (token !== null) tokens.set(name, token)
  }
  for (const list of ['additional_special_tokens', 'extra_special_tokens']) {
    const value = config[list]
    if (typeof value !== 'object' || value === null) continue
    for (const [key, entry] of Object.entries(value)) {
      const token = content(entry)
      if (token !== null) tokens.set(Array.isArray(value) ? `${list}_${key}` : key, token)
    }
  }
  return tokens
}

function content (value: unknown): string | null {
  if (typeof value === 'string') return value
  const inner = (value as { content?: unknown } | null | undefined)?.content
  return typeof inner === 'string' ? inner : null
}
