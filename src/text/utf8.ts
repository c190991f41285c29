/**
 * How many leading bytes can be decoded now without changing what later bytes decode to. A character whose lead byte stands among the
 * last three and is not complete stays behind; splitting before a lead byte never moves a U+FFFD (WHATWG Encoding, UTF-8 decoder).
 */
export function completeLength (bytes: Uint8Array): number {
  const end = bytes.length
  for (let back = 1; back <= 3 && back <= end; back++) {
    const byte = bytes[end - back]!
    if (byte >= 0x80 && byte < 0xc0) continue
    return charLength(byte) > back ? end - back : end
  }
  return end
}

function charLength (lead: number): number {
  if (lead < 0xc2 || lead > 0xf4) return 1
  return lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4
}
