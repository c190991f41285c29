/** Bytes from the first to the last, both included. */
export type ByteRange = readonly [first: number, last: number]

const LENGTH_ENDS = [0x7f, 0x7ff, 0xffff]

/** The UTF-8 of the characters in a range, as sequences of byte ranges. Surrogates have no UTF-8. */
export function utf8Ranges (first: number, last: number): ByteRange[][] {
  if (first > last) return []
  if (first <= 0xdfff && last >= 0xd800) return [...utf8Ranges(first, 0xd7ff), ...utf8Ranges(0xe000, last)]
  for (const end of LENGTH_ENDS) {
    if (first <= end && last > end) return [...utf8Ranges(first, end), ...utf8Ranges(end + 1, last)]
  }
  const low = Buffer.from(String.fromCodePoint(first))
  for (let i = 1; i < low.length; i++) {
    const mask = (1 << 6 * i) - 1
    if ((first & ~mask) === (last & ~mask)) continue
    const border = (first & mask) !== 0 ? (first | mask) + 1 : (last & mask) !== mask ? last & ~mask : null
    if (border !== null) return [...utf8Ranges(first, border - 1), ...utf8Ranges(border, last)]
  }
  const high = Buffer.from(String.fromCodePoint(last))
  return [Array.from(low, (byte, i): ByteRange => [byte, high[i]!])]
}
