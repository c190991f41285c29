/** A header of replies with the label of the engine's weights: a gateway learns of new labels by it. */
export const WEIGHT_VERSION_HEADER = 'x-refit-weight-version'

/** Longer labels would not fit in every client's limit of headers. */
const MAX_LENGTH = 2048

/** Percent-encoded, because labels may be any text. Undefined for a label that cannot be sent. */
export function encodeLabel (label: string): string | undefined {
  try {
    const text = encodeURIComponent(label)
    return text.length > MAX_LENGTH ? undefined : text
  } catch {
    return undefined
  }
}

export function decodeLabel (value: unknown): string | undefined {
  try {
    return typeof value === 'string' ? decodeURIComponent(value) : undefined
  } catch {
    return undefined
  }
}
