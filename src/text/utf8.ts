/**
 * Number of leading bytes that can be decoded now without changing the decoding of later bytes. An incomplete character
 * whose lead byte is among the last three bytes waits; a split before a lead byte never moves a U+FFFD (WHATWG
 * Encoding, UTF-8 decoder).
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
