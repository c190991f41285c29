/** The files of an adapter as PEFT saves it. */
export const ADAPTER_CONFIG = 'adapter_config.json'
export const ADAPTER_WEIGHTS = 'adapter_model.safetensors'

export interface AdapterForm {
  /** The value of content-type, with the boundary. */
  type: string
  length: number
  chunks: AsyncIterable<Uint8Array>
}

/**
 * Both files of an adapter as multipart/form-data. `boundary` may not occur in the bytes: a random UUID does not.
 * `weights`: a safetensors file that is read while it is sent.
 */
export function adapterForm (
  config: unknown,
  weights: { length: number, chunks: AsyncIterable<Uint8Array> },
  boundary: string
): AdapterForm {
  const head = Buffer.from(
    part(boundary, ADAPTER_CONFIG, 'application/json') + JSON.stringify(config) + '\r\n' +
      part(boundary, ADAPTER_WEIGHTS, 'application/octet-stream')
  )
  const tail = Buffer.from(`\r\n--${boundary}--\r\n`)
  return {
    type: `multipart/form-data; boundary=${boundary}`,
    length: head.length + weights.length + tail.length,
    chunks: chunks()
  }

  async function* chunks (): AsyncGenerator<Uint8Array, void, undefined> {
    yield head
    yield* weights.chunks
    yield tail
  }
}

function part (boundary: string, name: string, type: string): string {
  return `--${boundary}\r\ncontent-disposition: form-data; name="file"; filename="${name}"\r\n` +
    `content-type: ${type}\r\n\r\n`
}
