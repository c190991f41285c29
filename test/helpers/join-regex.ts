/** One regular expression from several, for texts longer than a line. */
export function joinRegex (...parts: readonly RegExp[]): RegExp {
  return new RegExp(parts.map(({ source }) => source).join(''))
}
