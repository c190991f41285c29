import { createHash } from 'node:crypto'
import { AwsV4Signer } from 'aws4fetch'
import { RefitError } from '../../errors.ts'

/** An object of S3, as a trainer names it. */
export interface S3Name {
  bucket: string
  region: string
  key: string
}

export interface S3Options {
  /**
   * Default: the process's own. Read: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_ENDPOINT_URL_S3,
   * AWS_ENDPOINT_URL.
   */
  env?: Readonly<Record<string, string | undefined>>
  now?: () => Date
  signal?: AbortSignal
}

// They become part of a host name, so a value that names another host than S3's is refused.
const BUCKET = /^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$/
const REGION = /^[a-z0-9-]{2,40}$/
const MAX_KEY = 1024
const TIMEOUT_MS = 600_000
/** Statuses of a bucket that has just been made, and of an overloaded store. */
const LATER = [307, 408, 429]
const EMPTY = createHash('sha256').digest('hex')

/**
 * All of an object, at most `limit` bytes. Throws INVALID_REQUEST, BODY_TOO_LARGE, or
 * STORE_UNREACHABLE (502: the trainer should try again).
 */
export async function readS3Object (name: S3Name, limit: number, options: S3Options = {}): Promise<Uint8Array> {
  const { env = process.env, now = () => new Date(), signal } = options
  checkName(name)
  const { url, headers } = await signedGet(name, env, now())
  const what = `s3://${name.bucket}/${name.key}`
  const end = AbortSignal.timeout(TIMEOUT_MS)
  const reply = await fetch(url, {
    headers,
    redirect: 'manual',
    signal: signal === undefined ? end : AbortSignal.any([end, signal])
  })
    .catch((error: unknown) => {
      throw unreachable(what, error)
    })
  if (reply.status !== 200) {
    const message = `${what}: ${url.host} answers ${reply.status}${reasonIn(await reply.text().catch(() => ''))}`
    if (reply.status === 403) {
      throw new RefitError(
        'INVALID_REQUEST',
        `${message}. The server's credentials are those of its environment (AWS_ACCESS_KEY_ID, ` +
          'AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN)',
        { param: 'key' }
      )
    }
    throw new RefitError(
      reply.status >= 500 || LATER.includes(reply.status) ? 'STORE_UNREACHABLE' : 'INVALID_REQUEST',
      message,
      { param: 'key' }
    )
  }
  const length = Number(reply.headers.get('content-length') ?? NaN)
  if (!Number.isSafeInteger(length) || length > limit) {
    await reply.body?.cancel()
    if (length > limit) throw new RefitError('BODY_TOO_LARGE', `${what} has ${length} bytes, and ${limit} are the most`)
    throw new RefitError('STORE_UNREACHABLE', `${what}: the reply does not say how long it is`)
  }
  return await collect(reply, length, what)
}

/** The rest of a refusal may repeat credentials, so only these parts are quoted. */
function reasonIn (xml: string): string {
  const [code, message] = ['Code', 'Message'].map(name => new RegExp(`<${name}>([^<]{1,200})</${name}>`).exec(xml)?.[1])
  return code === undefined ? '' : `: ${code}${message === undefined ? '' : `, ${message}`}`
}

async function collect (reply: Response, length: number, what: string): Promise<Uint8Array> {
  const bytes = new Uint8Array(length)
  let at = 0
  try {
    for await (const chunk of reply.body ?? []) {
      if (at + chunk.length > length) break
      bytes.set(chunk, at)
      at += chunk.length
    }
  } catch (error) {
    throw unreachable(what, error)
  }
  if (at !== length) throw unreachable(what, new Error(`it ended after ${at} of ${length} bytes`))
  return bytes
}

function checkName ({ bucket, region, key }: S3Name): void {
  if (!BUCKET.test(bucket) || bucket.includes('..')) {
    throw new RefitError(
      'INVALID_REQUEST',
      `bucket: ${JSON.stringify(bucket.slice(0, 80))} is no name of a bucket`,
      { param: 'bucket' }
    )
  }
  if (!REGION.test(region)) {
    throw new RefitError(
      'INVALID_REQUEST',
      `region: ${JSON.stringify(region.slice(0, 80))} is no region`,
      { param: 'region' }
    )
  }
  if (key.length === 0 || Buffer.byteLength(key) > MAX_KEY) {
    throw new RefitError('INVALID_REQUEST', `key: expected 1 to ${MAX_KEY} bytes`, { param: 'key' })
  }
  // A URL with such parts would lead out of the bucket.
  if (key.split('/').some(part => part === '.' || part === '..')) {
    throw new RefitError('INVALID_REQUEST', 'key: "." and ".." between its slashes are not taken', { param: 'key' })
  }
}

/** A GET request for the object with AWS's Signature Version 4, or without a signature if there are no credentials. */
export async function signedGet (
  { bucket, region, key }: S3Name,
  env: NonNullable<S3Options['env']>,
  now: Date
): Promise<{ url: URL, headers: Record<string, string> }> {
  // An empty variable counts as unset, as in AWS's own clients.
  const endpoint = env['AWS_ENDPOINT_URL_S3'] || env['AWS_ENDPOINT_URL']
  const path = key.split('/').map(encode).join('/')
  if (endpoint && !URL.canParse(endpoint)) {
    throw new RefitError(
      'CONFIG',
      `AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL: ${JSON.stringify(endpoint)} is no URL`
    )
  }
  const host = `s3.${region}.amazonaws.com${region.startsWith('cn-') ? '.cn' : ''}`
  // Private stores have the bucket in the path, because its name is not in the DNS. For AWS a bucket with dots is in
  // the path, because the certificate covers only names without dots.
  const isInPath = Boolean(endpoint) || bucket.includes('.')
  const url = new URL(endpoint || `https://${isInPath ? '' : `${bucket}.`}${host}/`)
  url.pathname = isInPath ? `${url.pathname.replace(/\/$/, '')}/${bucket}/${path}` : `/${path}`
  const { AWS_ACCESS_KEY_ID: accessKeyId, AWS_SECRET_ACCESS_KEY: secretAccessKey, AWS_SESSION_TOKEN: sessionToken } =
    env
  if (!accessKeyId || !secretAccessKey) return { url, headers: {} }
  const datetime = now.toISOString().replace(/[-:]|\.\d+/g, '')
  const signer = new AwsV4Signer({
    url: url.href,
    accessKeyId,
    secretAccessKey,
    datetime,
    service: 's3',
    region,
    headers: { 'x-amz-content-sha256': EMPTY },
    ...sessionToken ? { sessionToken } : {}
  })
  const { headers } = await signer.sign()
  headers.delete('host')
  return { url, headers: Object.fromEntries(headers) }
}

/** The form of RFC 3986, which signatures require. */
function encode (part: string): string {
  return encodeURIComponent(part).replace(/[!'()*]/g, char => `%${char.charCodeAt(0).toString(16).toUpperCase()}`)
}

function unreachable (what: string, error: unknown): RefitError {
  const { message, cause } = error as { message?: string, cause?: { message?: string } }
  return new RefitError('STORE_UNREACHABLE', `${what} cannot be read: ${cause?.message ?? message ?? String(error)}`, {
    cause: error
  })
}
