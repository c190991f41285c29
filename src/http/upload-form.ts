import type { IncomingMessage } from 'node:http'
import { Busboy } from '@fastify/busboy'
import type { BusboyFileStream, BusboyHeaders } from '@fastify/busboy'
import { RefitError } from '../errors.ts'
import { pump } from './upload-pump.ts'
import type { PumpOptions } from './upload-pump.ts'

// Files have no limit of their own here: what they announce is held against the model, and counted.
const LIMITS = { files: 4096, fields: 100, parts: 5000, fieldNameSize: 100, fieldSize: 65536, headerPairs: 20, headerSize: 16384, fileSize: Infinity }
const FILE_HIGH_WATER = 1 << 20

/** What takes the bytes of one file. */
export interface FormFile {
  take: (chunk: Uint8Array) => Promise<void> | undefined
  end: () => Promise<void>
}

export interface FormOptions extends Pick<PumpOptions, 'stallMs' | 'broke' | 'signal'> {
  field: (name: string, value: string) => void
  /** Files come one after another, each when the one before it has ended. */
  file: (name: string) => FormFile
}

/**
 * Reads a multipart/form-data body: fields and files, in their order. One parser of its own per request: where a host has
 * @fastify/multipart, its decorators and hooks are inherited by every scope, so that a second one cannot be registered beside it.
 */
export async function readForm (request: IncomingMessage, { field, file, stallMs, broke, signal }: FormOptions): Promise<void> {
  let form: InstanceType<typeof Busboy>
  try {
    form = new Busboy({ headers: request.headers as BusboyHeaders, limits: LIMITS, fileHwm: FILE_HIGH_WATER })
  } catch (error) {
    throw malformed(error)
  }
  const control = new AbortController()
  let drained: (() => void) | undefined
  const fail = (error: unknown): void => {
    control.abort(error)
    drained?.()
  }
  const onAbort = (): void => { fail(signal.reason) }
  signal.addEventListener('abort', onAbort)
  if (signal.aborted) onAbort()
  let files: Promise<void> = Promise.resolve()
  const finished = new Promise<void>((resolve, reject) => {
    form.on('finish', resolve).on('error', error => { reject(malformed(error)) })
    control.signal.addEventListener('abort', () => { reject(control.signal.reason) })
  })
  finished.catch(fail)
  form.on('drain', () => { drained?.() })
  for (const what of ['parts', 'files', 'fields'] as const) {
    form.on(`${what}Limit`, () => { fail(new RefitError('BODY_TOO_LARGE', `the form has more than ${LIMITS[what]} ${what}`)) })
  }
  form.on('field', (name, value, _nameTruncated, truncated) => {
    try {
      if (truncated) throw new RefitError('BODY_TOO_LARGE', `the field ${JSON.stringify(String(name).slice(0, 100))} is longer than ${LIMITS.fieldSize} bytes`)
      field(name, value)
    } catch (error) {
      fail(error)
    }
  })
  form.on('file', (name, stream, filename) => {
    // Before its turn comes it may break as well.
    stream.on('error', error => { fail(malformed(error)) })
    files = files.then(async () => { await readFile(stream, () => file(filename ?? name ?? 'a file without a name'), control.signal) })
    files.catch(fail)
  })
  try {
    await pump(request, {
      take: chunk => {
        if (form.write(chunk) || control.signal.aborted) return undefined
        return new Promise(resolve => { drained = resolve })
      },
      stallMs,
      broke: error => {
        fail(error)
        broke(error)
      },
      signal: control.signal
    })
    form.end()
    await finished
    await files
  } finally {
    signal.removeEventListener('abort', onAbort)
    // A file that is being taken is waited for, so that its owner may close it.
    await files.catch(() => {})
  }
}

async function readFile (stream: BusboyFileStream, open: () => FormFile, signal: AbortSignal): Promise<void> {
  signal.throwIfAborted()
  const file = open()
  let pending: Promise<void> | undefined
  await new Promise<void>((resolve, reject) => {
    let failure: unknown
    const settle = (error?: unknown): void => {
      stream.off('data', onData).off('end', settle)
      signal.removeEventListener('abort', onAbort)
      failure ??= error
      const after = (): void => { failure === undefined ? resolve() : reject(failure) }
      if (pending === undefined) after()
      else pending.then(after, after)
    }
    const onAbort = (): void => { settle(signal.reason) }
    const onData = (chunk: Buffer): void => {
      try {
        pending = file.take(chunk)
      } catch (error) {
        return settle(error)
      }
      if (pending === undefined) return
      stream.pause()
      pending.then(() => {
        pending = undefined
        if (!signal.aborted) stream.resume()
      }, (error: unknown) => {
        pending = undefined
        settle(error)
      })
    }
    stream.on('end', settle)
    signal.addEventListener('abort', onAbort)
    stream.on('data', onData)
  })
  await file.end()
}

function malformed (error: unknown): RefitError {
  return new RefitError('BODY_BROKEN', `the body is no well-formed multipart/form-data (${error instanceof Error ? error.message : String(error)})`)
}
