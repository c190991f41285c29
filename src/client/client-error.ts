/** A call that failed: the server's refusal, or the reason why it could not be reached. */
export class ClientError extends Error {
  override readonly name = 'ClientError'
  /** HTTP status; 0 if there was no reply. */
  readonly status: number
  /** Code of refit's error table, if the reply had one. */
  readonly code: string | undefined
  /** The reply's body. */
  readonly body: unknown

  constructor (message: string, status: number, code: string | undefined, body: unknown, cause?: unknown) {
    super(message, cause === undefined ? undefined : { cause })
    this.status = status
    this.code = code
    this.body = body
  }

  static of (status: number, text: string): ClientError {
    let body: unknown = text
    try {
      body = JSON.parse(text)
    } catch { /* Text it stays. */ }
    const { message, error } = (typeof body === 'object' && body !== null ? body : {}) as {
      message?: string
      error?: string | { message?: string, code?: string }
    }
    const inner = typeof error === 'object' ? error : { message: error, code: undefined }
    return new ClientError(message ?? inner.message ?? (text.trim() || `status ${status}`), status, inner.code, body)
  }
}
